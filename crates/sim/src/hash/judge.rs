//! The judge of keys: it uses only what clients asked and were answered, and nothing from the index itself.
//!
//! J1. A key has one number: all answers about it are the same.
//! J2. A number belongs to one key.
//! J3. A question that begins after an answer has named a key's number is answered with a number.
//! J4. If a key is found, an insert of it had begun before.

use std::collections::BTreeMap;

/// What was asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Question {
    /// Does the key have a number?
    Find,
    /// Give it one.
    Insert,
}

/// A question about a key. The begin and the end of every question are numbered in one sequence: times are
/// these numbers.
#[derive(Clone, Copy, Debug)]
struct Operation {
    key: usize,
    question: Question,
    begun: u64,
    /// If it was answered: when, and with which number, if any.
    answered: Option<(u64, Option<u64>)>,
}

#[derive(Default)]
pub(super) struct History {
    operations: Vec<Operation>,
    now: u64,
}

impl History {
    /// Records that a client asks. Returns the place of the question.
    pub(super) fn begin(&mut self, key: usize, question: Question) -> usize {
        self.now += 1;
        self.operations.push(Operation { key, question, begun: self.now, answered: None });
        self.operations.len() - 1
    }

    /// Records the answer to the question at this place.
    pub(super) fn end(&mut self, place: usize, number: Option<u64>) {
        self.now += 1;
        self.operations[place].answered = Some((self.now, number));
    }

    pub(super) fn operations(&self) -> u64 {
        self.operations.len() as u64
    }

    /// Returns violations of J1 to J4: for each key, at most one of each rule.
    pub(super) fn judge(&self) -> Vec<String> {
        let mut complaints = Vec::new();
        let mut keys: BTreeMap<usize, Vec<&Operation>> = BTreeMap::new();
        for operation in &self.operations {
            keys.entry(operation.key).or_default().push(operation);
        }
        let mut owners: BTreeMap<u64, usize> = BTreeMap::new();
        for (&key, operations) in &keys {
            complaints.extend(judge_key(key, operations));
            for number in numbers(operations).map(|(_, number)| number) {
                let owner = *owners.entry(number).or_insert(key);
                if owner != key {
                    complaints.push(format!("keys {owner} and {key} both have number {number}"));
                    break;
                }
            }
        }
        complaints
    }
}

/// All numbers in the answers, each with the time of its answer.
fn numbers<'a>(operations: &'a [&Operation]) -> impl Iterator<Item = (u64, u64)> + 'a {
    operations.iter().filter_map(|operation| {
        let (at, number) = operation.answered?;
        Some((at, number?))
    })
}

fn judge_key(key: usize, operations: &[&Operation]) -> Vec<String> {
    let mut complaints = Vec::new();
    let Some((known_at, number)) = numbers(operations).min() else { return complaints };
    if let Some((_, other)) = numbers(operations).find(|told| told.1 != number) {
        complaints.push(format!("key {key} has numbers {number} and {other}"));
    }
    let is_missed = |operation: &&&Operation| {
        operation.begun > known_at && operation.answered.is_some_and(|(_, number)| number.is_none())
    };
    if operations.iter().any(|operation| is_missed(&operation)) {
        complaints.push(format!("key {key} had number {number} and was not found"));
    }
    let inserts = operations.iter().filter(|operation| operation.question == Question::Insert);
    if inserts.map(|operation| operation.begun).min().is_none_or(|first| first > known_at) {
        complaints.push(format!("key {key} was found before it was inserted"));
    }
    complaints
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(script: &[(usize, Question, Option<u64>)]) -> Vec<String> {
        let mut history = History::default();
        for &(key, question, number) in script {
            let place = history.begin(key, question);
            history.end(place, number);
        }
        history.judge()
    }

    #[test]
    fn a_key_with_one_number_that_all_clients_find_is_right() {
        let script = [
            (1, Question::Find, None),
            (1, Question::Insert, Some(5)),
            (1, Question::Find, Some(5)),
            (2, Question::Insert, Some(6)),
            (1, Question::Insert, Some(5)),
            (3, Question::Find, None),
        ];
        assert_eq!(judged(&script), [""; 0]);
    }

    #[test]
    fn each_kind_of_violation_is_found() {
        let insert = |key, number| (key, Question::Insert, Some(number));
        let two_numbers = judged(&[insert(1, 5), insert(1, 6)]);
        assert_eq!(two_numbers, ["key 1 has numbers 5 and 6"]);
        let two_keys = judged(&[insert(1, 5), insert(2, 5)]);
        assert_eq!(two_keys, ["keys 1 and 2 both have number 5"]);
        let missed = judged(&[insert(1, 5), (1, Question::Find, None)]);
        assert_eq!(missed, ["key 1 had number 5 and was not found"]);
        let from_nowhere = judged(&[(1, Question::Find, Some(5)), insert(1, 5)]);
        assert_eq!(from_nowhere, ["key 1 was found before it was inserted"]);
    }

    #[test]
    fn an_insert_in_flight_may_have_happened_or_not() {
        let mut history = History::default();
        let insert = history.begin(1, Question::Insert);
        let find = history.begin(1, Question::Find);
        let other = history.begin(1, Question::Find);
        history.end(find, Some(5));
        history.end(other, None);
        assert_eq!(history.judge(), [""; 0]);
        history.end(insert, Some(5));
        assert_eq!(history.judge(), [""; 0]);
    }
}
