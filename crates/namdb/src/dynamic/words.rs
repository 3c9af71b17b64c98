//! The text that describes types: names, numbers and punctuation.

/// Deepest nesting of a type.
const MOST_DEPTH: u32 = 16;

/// Text that is read from left to right.
pub struct Words<'a> {
    rest: &'a str,
    depth: u32,
}

impl<'a> Words<'a> {
    pub fn new(text: &'a str) -> Self {
        Words { rest: text.trim_start(), depth: 0 }
    }

    /// Whether nothing is left.
    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// Takes this text, if it comes next.
    pub fn take(&mut self, text: &str) -> bool {
        match self.rest.strip_prefix(text) {
            Some(rest) => {
                self.rest = rest.trim_start();
                true
            }
            None => false,
        }
    }

    /// The same, or an error that says what is wanted.
    pub fn expect(&mut self, text: &str) -> Result<(), String> {
        if self.take(text) { Ok(()) } else { Err(format!("{text:?} is wanted before {:?}", self.rest)) }
    }

    /// Takes a name, or a number.
    pub fn word(&mut self) -> Result<&'a str, String> {
        let is_part = |letter: char| letter.is_alphanumeric() || letter == '_';
        let end = self.rest.find(|letter| !is_part(letter)).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest.trim_start();
        if word.is_empty() { Err(format!("a name is wanted before {rest:?}")) } else { Ok(word) }
    }

    /// Takes things that commas separate, up to this text.
    pub fn list<T>(
        &mut self,
        end: &str,
        mut next: impl FnMut(&mut Self) -> Result<T, String>,
    ) -> Result<Vec<T>, String> {
        self.depth += 1;
        if self.depth > MOST_DEPTH {
            return Err("it is nested too deeply".to_owned());
        }
        let mut all = Vec::new();
        while !self.take(end) {
            if !all.is_empty() {
                self.expect(",")?;
                if self.take(end) {
                    break;
                }
            }
            all.push(next(self)?);
        }
        self.depth -= 1;
        Ok(all)
    }
}
