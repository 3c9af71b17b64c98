//! Files on a mount, written to far memory and read from there.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

use rustix::fs::Advice;

/// Writes a new file, and syncs it.
pub fn write_new(path: &Path, data: &[u8]) -> std::io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(data)?;
    file.sync_all()
}

/// Reads a file from far memory: the kernel drops its pages of the file first.
pub fn read_from_far(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    rustix::fs::fadvise(&file, 0, None, Advice::DontNeed)?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(bytes)
}
