//! All figures of the papers in one run: those about files alone first, then those that need a database.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;

use super::{Effort, report};
use crate::databases::duckdb::DuckDb;
use crate::files::{
    BYTES_MIN, Figure, FilesOptions, Section, is_about_files_alone, run_files, write_sections,
};
use crate::machine::scratch_dir;
use crate::progress::warn;
use crate::stop::StopFlag;
use crate::table::peers::check_installed;
use crate::throttle::ThrottledVolume;

/// Size of the file behind the page cache at scale 1.
const CACHED_BYTES_PER_SCALE: f64 = 512e6;
/// How many times longer a server is measured than a file: a scan takes milliseconds.
const SCANS_PER_FILE_SLICE: u32 = 12;
/// More than a file system takes for itself.
const VOLUME_MIB: u64 = 256;

/// How much to measure, and where to write it.
#[derive(Clone, Debug)]
pub struct PaperOptions {
    /// Folder of the document and its drawings.
    pub out_dir: PathBuf,
    /// Number of rounds; each measures everything about files once.
    pub rounds: usize,
    /// Time per measurement.
    pub time: Duration,
    /// Size of each file.
    pub bytes: u64,
    /// Whether to measure the peers that `scripts/setup bench` installs.
    pub peers: bool,
    /// Number of rounds of the figures with a database.
    pub database_rounds: usize,
    /// TPC-H's scale factor.
    pub scale: f64,
    /// A folder on the machine's disk.
    pub work_dir: PathBuf,
}

/// Measures figures, writes the document, and returns their tables. `farpool` is this program's file. Call it
/// on the main thread: child processes are tied to the thread that starts them.
pub fn run_paper(
    figures: &[Figure],
    options: &PaperOptions,
    farpool: &Path,
    stop: &StopFlag,
) -> Result<String> {
    let mut sections = Vec::new();
    if figures.iter().any(|&figure| is_about_files_alone(figure)) {
        sections.extend(about_files(figures, options, farpool, stop)?);
        write_sections(&options.out_dir, &sections)?; // at once, because the other figures take long
    }
    if figures.iter().any(|&figure| report::has(figure)) {
        let effort = Effort {
            rounds: options.database_rounds,
            scale: options.scale,
            slice: options.time * SCANS_PER_FILE_SLICE,
            work_dir: &options.work_dir,
            farpool,
        };
        let about_databases = report::measure(figures, &effort, stop)?;
        write_sections(&options.out_dir, &about_databases)?;
        sections.extend(about_databases);
    }
    Ok(tables(&sections))
}

/// Measures figures of the page cache, writes the document, and returns their tables. Call it on the main
/// thread.
pub fn run_paper_cache(
    figures: &[Figure],
    out_dir: &Path,
    effort: &Effort<'_>,
    stop: &StopFlag,
) -> Result<String> {
    // Not only when it is their turn.
    if figures.contains(&Figure::CachedScan) {
        check_installed(&["nbdkit", "nbdfuse"], "the peers")?;
    }
    if figures.iter().any(|figure| matches!(figure, Figure::Sigmod18 | Figure::Sigmod20)) {
        DuckDb::find()?;
    }
    let mut sections = Vec::new();
    if figures.iter().any(|&figure| is_about_files_alone(figure)) {
        sections.extend(about_cached_files(figures, effort, stop)?);
        write_sections(out_dir, &sections)?; // at once, because the other figures take long
    }
    // Each figure is written as soon as it is measured: all together take more than an hour.
    for &figure in figures {
        let measured = report::measure(&[figure], effort, stop)?;
        write_sections(out_dir, &measured)?;
        sections.extend(measured);
    }
    Ok(tables(&sections))
}

fn about_cached_files(figures: &[Figure], effort: &Effort<'_>, stop: &StopFlag) -> Result<Vec<Section>> {
    let work = scratch_dir(effort.work_dir, "farpool-paper-")?;
    let options = FilesOptions {
        rounds: effort.rounds,
        seconds: whole_milliseconds(effort.slice / SCANS_PER_FILE_SLICE).as_secs_f64(),
        bytes: cached_file_bytes(effort.scale),
        peers: false,
        disk: work.path().into(),
        throttled: None,
    };
    run_files(figures, &options, effort.farpool, stop.flag())
}

fn whole_milliseconds(time: Duration) -> Duration {
    Duration::from_millis((time.as_secs_f64() * 1e3).round() as u64)
}

/// Whole pages, and as many as a measurement needs at least.
fn cached_file_bytes(scale: f64) -> u64 {
    let bytes = (CACHED_BYTES_PER_SCALE * scale) as u64;
    bytes.next_multiple_of(1 << 20).max(BYTES_MIN)
}

fn tables(sections: &[Section]) -> String {
    let bodies: Vec<String> =
        sections.iter().map(|section| format!("{}\n\n{}", section.figure, section.tables())).collect();
    bodies.join("\n")
}

fn about_files(
    figures: &[Figure],
    options: &PaperOptions,
    farpool: &Path,
    stop: &StopFlag,
) -> Result<Vec<Section>> {
    let work = scratch_dir(&options.work_dir, "farpool-paper-")?;
    let volume = throttled(work.path(), options.bytes);
    if let Err(error) = &volume {
        warn(&format!("there is no throttled disk to compare with: {error:#}"));
    }
    let options = FilesOptions {
        rounds: options.rounds,
        seconds: options.time.as_secs_f64(),
        bytes: options.bytes,
        peers: options.peers,
        disk: work.path().into(),
        throttled: volume.as_ref().ok().map(|volume| volume.mount_point().to_owned()),
    };
    let sections = run_files(figures, &options, farpool, stop.flag())?;
    if let Ok(mut volume) = volume {
        volume.remove()?;
    }
    Ok(sections)
}

/// A throttled volume with room for one file, mounted on a new folder below `work`.
fn throttled(work: &Path, bytes: u64) -> Result<ThrottledVolume> {
    let mount_point = work.join("throttled");
    fs::create_dir(&mount_point)?;
    ThrottledVolume::make(work, &mount_point, 2 * (bytes >> 20) + VOLUME_MIB, None)
}
