//! The errors and answers with which operations end.

use farpool_wire::{NodeId, Refusal};
use rustix::io::Errno;

/// Why an operation did not succeed, as far as this side knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum OpError {
    /// The node refused it: nothing happened.
    #[error("refused: {0}")]
    Refused(Refusal),
    /// The queue was closed before the operation was handed over: nothing happened. Reconnect, then post
    /// again.
    #[error("node {node} is not connected; nothing was sent")]
    NotSent {
        /// The queue's node.
        node: NodeId,
    },
    /// It may have happened or not. Reconnect if the queue is closed; once the node has answered, a READ
    /// shows which.
    #[error("node {node}: unknown whether the operation happened: {cause}")]
    Unknown {
        /// The queue's node.
        node: NodeId,
        /// What ended the wait.
        cause: Uncertain,
    },
}

/// Why the outcome of an operation is unknown.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Uncertain {
    /// The connection ended.
    #[error("the connection was lost")]
    ConnectionLost,
    /// No connection could be made, since no process listens at the node's address: the node's process has
    /// ended.
    #[error("no process listens at its address")]
    NotListening,
    /// No completion in time; the queue is closed.
    #[error("no answer before the deadline")]
    Deadline,
    /// The grant was fenced while the operation ran, or the memory moved because another grant was fenced:
    /// attaching again tells which.
    #[error("the grant ended or its memory moved meanwhile")]
    EpochMoved,
    /// The peer broke the protocol; the queue is closed.
    #[error("the peer broke the protocol")]
    Protocol,
}

impl Uncertain {
    /// The cause that a system error stands for.
    pub(crate) fn of(errno: Errno) -> Self {
        match errno {
            Errno::CONNREFUSED => Uncertain::NotListening,
            _ => Uncertain::ConnectionLost,
        }
    }
}

/// What a node answered to a call.
#[derive(Debug)]
pub struct CallAnswer {
    /// The buffer of the request, now holding the answer from its start.
    pub buffer: crate::ArenaBuf,
    /// Length of the answer.
    pub bytes: usize,
}
