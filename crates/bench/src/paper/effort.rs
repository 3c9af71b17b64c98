use std::path::Path;
use std::time::Duration;

/// How much to measure for a figure, and where.
#[derive(Clone, Debug)]
pub struct Effort<'a> {
    /// The size of the data: TPC-H's scale factor in files.md; for the page cache, a multiple of each
    /// figure's usual size.
    pub scale: f64,
    /// Number of rounds; each measures every variant once.
    pub rounds: usize,
    /// Length of a slice, for figures that measure a server under load.
    pub slice: Duration,
    /// A folder on a real disk, for the databases.
    pub work_dir: &'a Path,
    /// The `farpool` binary.
    pub farpool: &'a Path,
}
