//! Sequential numbers of a saved sequence, as words of 32 bits.

use crate::base::error::{Error, SaveError};

/// An error about the current tensor, whose name the caller adds.
pub fn content(what: &'static str) -> Error {
    SaveError::Content { tensor: String::new(), what }.into()
}

/// Names the tensor in an error of [`content`].
pub fn in_tensor(error: Error, name: &str) -> Error {
    match error {
        Error::Save(SaveError::Content { what, .. }) => {
            SaveError::Content { tensor: name.to_owned(), what }.into()
        }
        other => other,
    }
}

/// Checks a condition.
///
/// # Errors
/// [`content`] if it is false.
pub fn sure(is: bool, what: &'static str) -> Result<(), Error> {
    if is { Ok(()) } else { Err(content(what)) }
}

/// Reads numbers in order.
pub struct Fields<'a>(&'a [u32]);

impl<'a> Fields<'a> {
    pub fn new(words: &'a [u32]) -> Fields<'a> {
        Fields(words)
    }

    /// The next `n` words.
    ///
    /// # Errors
    /// Fewer words are left.
    pub fn slice(&mut self, n: usize) -> Result<&'a [u32], Error> {
        let (first, rest) = self.0.split_at_checked(n).ok_or_else(|| content("it ends early"))?;
        self.0 = rest;
        Ok(first)
    }

    /// The next word.
    ///
    /// # Errors
    /// No word is left.
    pub fn word(&mut self) -> Result<u32, Error> {
        Ok(self.slice(1)?[0])
    }

    /// The next two words, the lower half first.
    ///
    /// # Errors
    /// Fewer words are left.
    pub fn long(&mut self) -> Result<u64, Error> {
        let [low, high] = [self.word()?, self.word()?];
        Ok(u64::from(low) | u64::from(high) << 32)
    }

    /// A number below `limit`.
    ///
    /// # Errors
    /// [`content`] with `what` for a larger number.
    pub fn below(&mut self, limit: usize, what: &'static str) -> Result<usize, Error> {
        let n = self.word()? as usize;
        sure(n < limit, what)?;
        Ok(n)
    }

    /// A number of at most `most`.
    ///
    /// # Errors
    /// [`content`] with `what` for a larger number.
    pub fn up_to(&mut self, most: u32, what: &'static str) -> Result<u32, Error> {
        let n = self.word()?;
        sure(n <= most, what)?;
        Ok(n)
    }

    /// A flag: 0 or 1.
    ///
    /// # Errors
    /// [`content`] for another number.
    pub fn flag(&mut self) -> Result<bool, Error> {
        Ok(self.up_to(1, "a flag that is neither 0 nor 1")? == 1)
    }

    /// Reads a number of items, each of which takes at least `each` of the words that follow.
    ///
    /// # Errors
    /// Fewer words are left.
    pub fn count(&mut self, each: usize) -> Result<usize, Error> {
        let n = self.word()? as usize;
        sure(n.checked_mul(each).is_some_and(|words| words <= self.0.len()), "more items than words")?;
        Ok(n)
    }

    /// Fills `to` with f32 numbers.
    ///
    /// # Errors
    /// Fewer words are left.
    pub fn floats(&mut self, to: &mut [f32]) -> Result<(), Error> {
        let words = self.slice(to.len())?;
        to.iter_mut().zip(words).for_each(|(to, word)| *to = f32::from_bits(*word));
        Ok(())
    }

    /// Checks that all words were read.
    ///
    /// # Errors
    /// Words are left.
    pub fn end(self) -> Result<(), Error> {
        sure(self.0.is_empty(), "it goes on past its end")
    }
}

/// Appends a number of 64 bits, the lower half first.
pub fn put_long(to: &mut Vec<u32>, n: u64) {
    to.extend([n as u32, (n >> 32) as u32]);
}

/// Appends the bits of numbers.
pub fn put_floats(to: &mut Vec<u32>, floats: &[f32]) {
    to.extend(floats.iter().map(|x| x.to_bits()));
}
