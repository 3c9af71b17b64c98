//! Newcomers: connections that have not presented a key, by their origin.
//!
//! N1. Newcomers use the places that connections with a key leave free, and never displace such a connection.
//! N2. When all places are taken, a new connection takes the place of the oldest newcomer of the origin that
//!     has the most newcomers. That newcomer is served once more first, and stays if its key has arrived.
//!     Nothing else that it sends matters, so none stays by sending a little.
//! Not here: their timeouts (`server.rs`), and what they may ask for (`connection/requests.rs`).

use std::collections::{BTreeSet, HashMap};

use super::origin::Origin;

/// Connections without a key, by their tokens, which grow with time.
#[derive(Default, Debug)]
pub struct Newcomers {
    by_origin: HashMap<Origin, BTreeSet<u64>>,
}

impl Newcomers {
    /// Adds a new connection.
    pub fn insert(&mut self, origin: Origin, token: u64) {
        self.by_origin.entry(origin).or_default().insert(token);
    }

    /// Removes a connection that has presented a key, or has ended.
    pub fn remove(&mut self, origin: Origin, token: u64) {
        if let Some(tokens) = self.by_origin.get_mut(&origin) {
            tokens.remove(&token);
            if tokens.is_empty() {
                self.by_origin.remove(&origin);
            }
        }
    }

    /// The newcomer that is to make room for the next connection, and its origin (N2).
    pub fn first_to_go(&self) -> Option<(Origin, u64)> {
        let origins = self.by_origin.iter();
        let oldest = origins.filter_map(|(&origin, tokens)| Some((tokens.len(), origin, *tokens.first()?)));
        let first = oldest.max_by_key(|&(count, _, oldest)| (count, std::cmp::Reverse(oldest)));
        first.map(|(_, origin, oldest)| (origin, oldest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_connection_of_the_origin_that_has_most_goes_first() {
        let mut newcomers = Newcomers::default();
        let (few, many) = (Origin::User(1), Origin::Address([127, 0, 0, 1].into()));
        newcomers.insert(few, 1);
        (2..5).for_each(|token| newcomers.insert(many, token));
        assert_eq!(newcomers.first_to_go(), Some((many, 2)));
        newcomers.remove(many, 2);
        assert_eq!(newcomers.first_to_go(), Some((many, 3)));
        newcomers.remove(many, 3);
        let first = newcomers.first_to_go();
        assert_eq!(first, Some((few, 1)), "of two that have as many, the one that came first");
        newcomers.remove(few, 1);
        newcomers.remove(many, 4);
        assert_eq!(newcomers.first_to_go(), None);
    }
}
