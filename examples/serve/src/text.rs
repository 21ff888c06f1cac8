//! Decodes tokens to text as far as it is final.

/// Joins the bytes of tokens to text. A character split over tokens is returned once it is complete; a possible beginning of a stop string
/// is held back until it is decided.
#[derive(Debug, Default)]
pub struct Text {
    stops: Vec<String>,
    /// An incomplete character.
    bytes: Vec<u8>,
    /// Text that may begin a stop string.
    held: String,
    /// Whether a stop string was found; no text is returned after it.
    pub stopped: bool,
}

impl Text {
    /// Decoder of a text that ends before the first of these strings; none may be empty.
    pub fn new(stops: Vec<String>) -> Text {
        Text { stops, ..Text::default() }
    }

    /// Adds the bytes of a token and returns the text that is final.
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

    /// The remaining text after the last token.
    pub fn finish(&mut self) -> String {
        if !std::mem::take(&mut self.bytes).is_empty() {
            self.held.push(char::REPLACEMENT_CHARACTER);
        }
        self.give() + &std::mem::take(&mut self.held)
    }

    /// Takes the final part of the held text.
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
