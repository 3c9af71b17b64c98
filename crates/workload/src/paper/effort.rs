use std::path::Path;
use std::time::Duration;

/// How much of a figure to measure, and where.
#[derive(Clone, Debug)]
pub struct Effort<'a> {
    /// The size of the data: TPC-H's scale factor, or millions of rows ([`range_scan`](super::range_scan)).
    pub scale: f64,
    /// How often each variant is measured.
    pub rounds: usize,
    /// How long each time, where a server at work is measured.
    pub slice: Duration,
    /// A folder on a real disk, for databases.
    pub work_dir: &'a Path,
    /// The `farpool` binary.
    pub farpool: &'a Path,
}
