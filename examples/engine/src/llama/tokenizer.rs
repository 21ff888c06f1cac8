//! Byte-level BPE tokenizer from a GGUF file (`tokenizer.ggml.model` = `gpt2`).
//!
//! A pattern of the model splits text into words, and the bytes of each word are merged pair by pair, the pair of lowest rank first. No
//! space and no token is added in front, and control tokens in the text are encoded like other text.

use super::gguf::Gguf;
use regex::Regex;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::error::Error;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Vocabulary, merges, and the pattern of words.
pub struct Tokenizer {
    /// Bytes of each token.
    bytes: Vec<Vec<u8>>,
    /// Token of each single byte; some vocabularies lack some bytes.
    byte_tokens: [Option<u32>; 256],
    /// The whole vocabulary, if a word that is a token is taken without merging.
    whole_words: Option<HashMap<Vec<u8>, u32>>,
    /// Rank and result of each pair.
    merges: HashMap<(u32, u32), (u32, u32)>,
    /// Pattern of words. Group 1 is a run of white space; if a word follows, it gets the last character of the run.
    words: Regex,
    /// Whether every numeric character is a word of its own, without white space in front.
    digits_apart: bool,
    bos: Option<u32>,
}

/// Words of GPT-2.
const GPT_2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|(\s+)";
/// Words of Llama 3: any one character may begin a word, and line ends belong to the preceding word.
const LLAMA_3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+|(\s+)"
);
/// Words of SmolLM: GPT-2's, with digits apart.
const SMOLLM: &str = r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|(\s+)";

impl Tokenizer {
    pub fn new(gguf: &Gguf) -> Result<Self> {
        let model = gguf.string("tokenizer.ggml.model")?;
        if model != "gpt2" {
            return Err(
                format!("tokenizer.ggml.model: {model:?}; only \"gpt2\" (byte-level BPE) is read").into()
            );
        }
        let (words, digits_apart, takes_whole_words) = match gguf.string("tokenizer.ggml.pre")? {
            "gpt-2" => (GPT_2, false, false),
            "smollm" => (SMOLLM, true, false),
            "llama-bpe" => (LLAMA_3, false, true),
            other => {
                let known = "\"gpt-2\", \"smollm\" and \"llama-bpe\"";
                return Err(format!("tokenizer.ggml.pre: {other:?}; {known} are read").into());
            }
        };
        let tokens = gguf.strings("tokenizer.ggml.tokens")?;
        let byte_of: HashMap<char, u8> = (0..=255).map(|byte| (stand_in(byte), byte)).collect();
        let bytes_of = |token: &str| -> Vec<u8> {
            // A control token may have characters that encode no byte: its bytes are then its text.
            let bytes: Option<_> = token.chars().map(|c| byte_of.get(&c).copied()).collect();
            bytes.unwrap_or_else(|| token.as_bytes().to_vec())
        };
        let mut ids = HashMap::new();
        for (id, token) in tokens.iter().enumerate() {
            if ids.insert(*token, u32::try_from(id)?).is_some() {
                return Err(format!("tokenizer.ggml.tokens: {token:?} twice, the second at {id}").into());
            }
        }
        let mut merges = HashMap::new();
        for (rank, merge) in gguf.strings("tokenizer.ggml.merges")?.into_iter().enumerate() {
            // The only space separates the two parts: within them a space is written Ġ.
            let parts = merge.split_once(' ');
            let found =
                parts.and_then(|(a, b)| Some(((*ids.get(a)?, *ids.get(b)?), *ids.get(&*format!("{a}{b}"))?)));
            let (pair, merged) = found.ok_or_else(|| {
                format!("tokenizer.ggml.merges: {merge:?} at {rank}: not two tokens which make a third")
            })?;
            merges.entry(pair).or_insert((u32::try_from(rank)?, merged));
        }
        let bos = match "tokenizer.ggml.add_bos_token" {
            name if gguf.has(name) && gguf.bool(name)? => Some(gguf.whole("tokenizer.ggml.bos_token_id")?),
            _ => None,
        };
        if let Some(bos) = bos.filter(|bos| *bos as usize >= tokens.len()) {
            return Err(format!("tokenizer.ggml.bos_token_id: {bos} of {} tokens", tokens.len()).into());
        }
        let one_byte = |byte| ids.get(&*stand_in(byte).to_string()).copied();
        let mut byte_tokens = [None; 256];
        (0..=255).zip(&mut byte_tokens).for_each(|(byte, token)| *token = one_byte(byte));
        let whole = || ids.iter().map(|(token, id)| (bytes_of(token), *id)).collect();
        Ok(Self {
            byte_tokens,
            whole_words: takes_whole_words.then(whole),
            bytes: tokens.iter().map(|token| bytes_of(token)).collect(),
            merges,
            words: Regex::new(words)?,
            digits_apart,
            bos,
        })
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// The token with exactly these bytes, such as a control token by its text. O(tokens).
    pub fn token(&self, bytes: &[u8]) -> Option<u32> {
        self.bytes.iter().position(|token| token == bytes).map(|id| id as u32)
    }

    /// Encodes a chat in ChatML, up to the start of the assistant's answer. Each message is a role and a text, between the tokens `begin`
    /// and `end`. The text is encoded as text even where it spells one of them.
    ///
    /// # Errors
    /// If a byte has no token.
    pub fn chat(&self, messages: &[(String, String)], begin: u32, end: u32) -> Result<Vec<u32>> {
        let mut tokens = Vec::from_iter(self.bos);
        for (role, content) in messages {
            tokens.push(begin);
            tokens.extend(self.encode(&format!("{role}\n{content}"))?);
            tokens.push(end);
            tokens.extend(self.encode("\n")?);
        }
        tokens.push(begin);
        tokens.extend(self.encode("assistant\n")?);
        Ok(tokens)
    }

    /// The token that the model expects at the start of a text, if any.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// Encodes a text.
    ///
    /// # Errors
    /// If a byte has no token.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let (mut out, mut at) = (Vec::new(), 0);
        while let Some(found) = self.words.captures_at(text, at) {
            let mut end = at + found[0].len();
            if let Some(space) = found.get(1) {
                let next = text[end..].chars().next();
                let follows = next.is_some_and(|c| !(self.digits_apart && c.is_numeric()));
                let last = space.as_str().chars().next_back().map_or(0, char::len_utf8);
                if follows && space.len() > last {
                    end -= last;
                }
            }
            let word = &text.as_bytes()[at..end];
            match self.whole_words.as_ref().and_then(|whole| whole.get(word)) {
                Some(id) => out.push(*id),
                None => self.merge(word, at, &mut out)?,
            }
            at = end;
        }
        Ok(out)
    }

    /// Appends the tokens of one word, which begins at byte `at` of the text.
    fn merge(&self, word: &[u8], at: usize, out: &mut Vec<u32>) -> Result<()> {
        // Symbols are a linked list, indexed by their first byte. The heap has (rank, index), smallest first; an entry whose pair was
        // merged meanwhile is skipped.
        let mut symbols = Vec::with_capacity(word.len());
        for (i, byte) in word.iter().enumerate() {
            let missing = || format!("byte {} of the text: {byte:#04x} has no token", at + i);
            symbols.push(Some(self.byte_tokens[usize::from(*byte)].ok_or_else(missing)?));
        }
        let mut next: Vec<usize> = (1..=word.len()).collect();
        let mut before: Vec<Option<usize>> = (0..word.len()).map(|i| i.checked_sub(1)).collect();
        let rank = |symbols: &[Option<u32>], next: &[usize], i: usize| {
            let pair = (symbols[i]?, (*symbols.get(next[i])?)?);
            self.merges.get(&pair).copied()
        };
        let mut heap = BinaryHeap::new();
        heap.extend((0..word.len()).filter_map(|i| Some(Reverse((rank(&symbols, &next, i)?.0, i)))));
        while let Some(Reverse((learnt, i))) = heap.pop() {
            let Some((_, merged)) = rank(&symbols, &next, i).filter(|now| now.0 == learnt) else { continue };
            symbols[next[i]] = None;
            symbols[i] = Some(merged);
            next[i] = next[next[i]];
            if let Some(before) = before.get_mut(next[i]) {
                *before = Some(i);
            }
            for i in [before[i], Some(i)].into_iter().flatten() {
                heap.extend(rank(&symbols, &next, i).map(|(rank, _)| Reverse((rank, i))));
            }
        }
        out.extend(symbols.into_iter().flatten());
        Ok(())
    }

    /// The bytes of tokens; a character may begin in one token and end in the next.
    ///
    /// # Errors
    /// For a number that is not a token.
    pub fn decode(&self, tokens: &[u32]) -> Result<Vec<u8>> {
        let mut out = Vec::new();
        for token in tokens {
            let bytes = self.bytes.get(*token as usize);
            out.extend(bytes.ok_or_else(|| format!("token {token}: the vocabulary has {}", self.len()))?);
        }
        Ok(out)
    }
}

/// The character that represents a byte in the vocabulary: the byte itself if it is printable in Latin-1, else the next unused character
/// from U+0100 on.
fn stand_in(byte: u8) -> char {
    let prints = |b: u8| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    if prints(byte) {
        return byte.into();
    }
    let unused = (0..byte).filter(|b| !prints(*b)).count() as u32;
    char::from_u32(0x100 + unused).unwrap_or(char::REPLACEMENT_CHARACTER)
}
