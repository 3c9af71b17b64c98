//! Control messages: what a control plane would send. They may be lost, duplicated and reordered.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;
use std::task::Waker;

use crate::sim::ProcessId;

/// A control message as it arrives.
#[derive(Clone)]
pub struct Letter {
    /// The sender.
    pub from: ProcessId,
    /// The content of the message. The copies of a duplicated message share it.
    pub content: Arc<dyn Any + Send + Sync>,
}

/// A process's messages that were not received yet.
#[derive(Default)]
pub(super) struct Mailbox {
    pub(super) letters: VecDeque<Letter>,
    pub(super) reader: Option<Waker>,
}

impl Mailbox {
    pub(super) fn put(&mut self, letter: Letter) {
        self.letters.push_back(letter);
        if let Some(reader) = self.reader.take() {
            reader.wake();
        }
    }
}
