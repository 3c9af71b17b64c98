//! What can go wrong with a file's data, one variant per decision of the caller.

use farpool_pool::{AccessError, NoSpace};

/// Why a file operation failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// Delete something, or lend the pool more memory.
    #[error("no far memory left for the file")]
    NoSpace,
    /// Start more nodes, or choose a redundancy that needs fewer.
    #[error(
        "the file's redundancy needs {wanted} nodes with room and the pool gives {found}: start more nodes with \
         `farpool node`, or choose fewer extents in a row, mirror or stripe"
    )]
    TooFewNodes {
        /// Nodes that a row needs.
        wanted: u64,
        /// Nodes of which the owner holds regions.
        found: u64,
    },
    /// Files end at [`crate::MAX_FILE_BYTES`].
    #[error("beyond the largest file size")]
    TooLarge,
    /// The contents are lost for good: write the range again, or give the file up.
    #[error("the data at offset {offset} are lost with their node or lease")]
    Lost {
        /// Start of the block.
        offset: u64,
    },
    /// Far memory does not hold the data that were written there. Handle it as [`FileError::Lost`], and check
    /// the node.
    #[error("far memory at offset {offset} does not hold the data that were written there")]
    Damaged {
        /// Start of the block.
        offset: u64,
    },
    /// Try again, and look at the disk of the overflow directory: it failed, or did not answer in time. After
    /// a write, the contents of the range are indeterminate.
    #[error("the overflow directory failed at offset {offset} of the file, or did not answer in time")]
    Storage {
        /// Start of the range.
        offset: u64,
    },
    /// Another writer of the block did not finish in time.
    #[error("the block at offset {offset} stayed locked too long")]
    Unavailable {
        /// Start of the block.
        offset: u64,
    },
    /// A process that works on the mount's files directly (`farpool run`) is stopped in the middle of an
    /// operation: continue it, or end it.
    #[error(
        "a process that works on the mount's files directly has not ended its operation for {} s; if it is stopped, \
         continue or end it",
        crate::guest::PATIENCE.as_secs()
    )]
    GuestAtWork,
    /// Nothing happened: close files, raise the limits (`ulimit -n`), and try again.
    #[error("this process is short of descriptors or memory")]
    Short,
    /// Nothing happened that cannot be repeated. Try again once nodes have answered or were given up.
    #[error(
        "the session's memory for transfers is taken by operations that their nodes have not answered yet"
    )]
    NoStaging,
    /// One call asked for more than a session has room for.
    #[error("the request is larger than one transfer may be")]
    TooLong,
}

impl From<NoSpace> for FileError {
    fn from(_: NoSpace) -> Self {
        FileError::NoSpace
    }
}

impl FileError {
    /// What a failed access to a block means for the file.
    pub(crate) fn from_access(error: AccessError, offset: u64) -> Self {
        match error {
            AccessError::LeaseLost { .. } | AccessError::NodeLost { .. } => FileError::Lost { offset },
            AccessError::Storage => FileError::Storage { offset },
            AccessError::ArenaFull => FileError::NoStaging,
            AccessError::Short { .. } => FileError::Short,
            AccessError::Refused(error) => {
                tracing::error!(%error, "a node refused what a lease should allow");
                FileError::Lost { offset }
            }
        }
    }
}

/// Whether a failed store has certainly changed nothing. After any other failure, the contents are
/// indeterminate.
pub(crate) fn nothing_was_stored(error: &AccessError) -> bool {
    matches!(error, AccessError::Refused(_) | AccessError::ArenaFull | AccessError::Short { .. })
}
