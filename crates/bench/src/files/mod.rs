//! The papers' figures about files in far memory, measured here beside floors, peers and disks.
//!
//! F1. Volumes that are compared run at the same time and are measured in turn. Every figure names its
//!     question, its floor, its method and its machine.
//! F2. If a read returns anything but what was written, there is no figure.
//! F3. A figure that is measured alone replaces only its own part of the document.
//! Not here: the figures for which a database runs, and the setup of the throttled disk; the caller provides
//! both.

mod aligned;
mod cached;
mod catalog;
mod checksum;
mod client;
mod figure;
mod fuse_floor;
mod ping_pong;
mod plain;
mod rounds;
mod scaling;
mod section;
mod verdict;
mod volume;

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use anyhow::{Result, ensure};

use crate::table::peers::check_installed;
pub(crate) use client::{Ask, FileOp};
pub use client::{Opening, serve_file_client};
pub use figure::{Document, Figure};
pub use fuse_floor::serve_fuse_floor;
pub use section::{Section, conditions, write as write_sections};
pub use verdict::Verdict;
pub(crate) use volume::{Kind, MountablePool, Spec, Surroundings, Volume};

/// Smallest file: it needs enough blocks for random places.
pub const BYTES_MIN: u64 = 16 << 20;

/// What `scripts/setup bench` installs.
const PROGRAMS: [&str; 3] = ["nbdkit", "nbdfuse", "setpriv"];

/// How much to measure, and where.
#[derive(Clone, Debug)]
pub struct FilesOptions {
    /// Number of rounds; each measures everything once.
    pub rounds: usize,
    /// Seconds per measurement.
    pub seconds: f64,
    /// Size of each file.
    pub bytes: u64,
    /// A folder on the machine's disk.
    pub disk: PathBuf,
    /// A folder on a throttled disk, if there is one.
    pub throttled: Option<PathBuf>,
    /// Whether to measure the peers that `scripts/setup bench` installs.
    pub peers: bool,
}

/// How much to measure.
#[derive(Clone, Copy, Debug)]
struct Effort {
    rounds: usize,
    seconds: f64,
}

fn document_rounds(effort: &Effort) -> String {
    let Effort { rounds, seconds } = effort;
    format!(
        "{rounds} rounds, in each of which all are measured in turn for {seconds} s; medians over the \
         rounds, ratios paired by round, with the smallest and the largest."
    )
}

/// Whether a figure is measured without a database.
pub fn is_about_files_alone(figure: Figure) -> bool {
    plain::has(figure) || matches!(figure, Figure::Sigmod5 | Figure::Sigmod6 | Figure::Checksum)
}

/// Measures figures. `farpool` is the path of this program, which runs as child processes, too. Call this
/// function on the main thread: child processes are tied to the thread that starts them.
pub fn run_files(
    figures: &[Figure],
    options: &FilesOptions,
    farpool: &Path,
    stop: &AtomicBool,
) -> Result<Vec<Section>> {
    ensure!(options.rounds > 0, "there must be at least one round: give --rounds 1 or more");
    ensure!(
        options.bytes >= BYTES_MIN,
        "a file must have at least {} MiB: raise --footprint",
        BYTES_MIN >> 20
    );
    let around = Surroundings {
        farpool,
        disk: &options.disk,
        throttled: options.throttled.as_deref(),
        peers: options.peers,
        bytes: options.bytes,
    };
    if options.peers {
        check_installed(&PROGRAMS, "the peers")?;
    }
    let effort = Effort { rounds: options.rounds, seconds: options.seconds };
    let mut sections = Vec::new();
    if figures.iter().any(|&figure| plain::has(figure)) {
        sections.extend(plain::measure(figures, &around, &effort, stop)?);
    }
    if figures.contains(&Figure::Sigmod5) {
        sections.push(scaling::nodes(&around, &effort, stop)?);
    }
    if figures.contains(&Figure::Sigmod6) {
        sections.push(scaling::clients(&around, &effort, stop)?);
    }
    if figures.contains(&Figure::Checksum) {
        sections.push(checksum::checksum(&around, &effort, stop)?);
    }
    Ok(sections)
}
