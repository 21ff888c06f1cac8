//! Text out of tokens, as it becomes certain.

/// Puts the bytes of tokens together to text: a character whose bytes come with several tokens is given once it is whole, and what may
/// be the beginning of a stop string is held back until it is known.
#[derive(Debug, Default)]
pub struct Text {
    stops: Vec<String>,
    /// The beginning of a character.
    bytes: Vec<u8>,
    /// Text that may still turn out to be a stop string.
    held: String,
    /// Whether a stop string came; nothing follows then.
    pub stopped: bool,
}

impl Text {
    /// Text that ends before the first of these strings, none of which is empty.
    pub fn new(stops: Vec<String>) -> Text {
        Text { stops, ..Text::default() }
    }

    /// Takes the bytes of a token, and gives the text that is certain by then.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.bytes.extend_from_slice(bytes);
        loop {
            let (valid, broken) = match std::str::from_utf8(&self.bytes) {
                Ok(text) => (text.len(), None),
                Err(error) => (error.valid_up_to(), error.error_len()),
            };
            self.held.push_str(&String::from_utf8_lossy(&self.bytes[..valid]));
            self.bytes.drain(..valid + broken.unwrap_or(0));
            match broken {
                Some(_) => self.held.push(char::REPLACEMENT_CHARACTER),
                None => break,
            }
        }
        self.give()
    }

    /// The text that is left when no token follows.
    pub fn finish(&mut self) -> String {
        if !std::mem::take(&mut self.bytes).is_empty() {
            self.held.push(char::REPLACEMENT_CHARACTER);
        }
        let text = self.give();
        text + &std::mem::take(&mut self.held)
    }

    /// What of the held text is certain.
    fn give(&mut self) -> String {
        if self.stopped {
            self.held.clear();
        }
        if let Some(at) = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min() {
            self.stopped = true;
            self.held.truncate(at);
            return std::mem::take(&mut self.held);
        }
        let begins = |at: &usize| self.stops.iter().any(|stop| stop.starts_with(&self.held[*at..]));
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let from = self.held.len().saturating_sub(longest);
        let starts = self.held.char_indices().map(|(at, _)| at).filter(|at| *at >= from);
        let at = starts.into_iter().find(begins).unwrap_or(self.held.len());
        let rest = self.held.split_off(at);
        std::mem::replace(&mut self.held, rest)
    }
}
