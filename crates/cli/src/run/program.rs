//! Finds the program to run, and whether a library can be preloaded into it.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

/// What a file is, to the dynamic linker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// Started by the dynamic linker.
    Dynamic,
    /// Has no dynamic linker.
    Static,
    /// For another processor, or for its 32-bit mode.
    Foreign,
    /// Gains privileges when started, so that the linker ignores `LD_PRELOAD`.
    Privileged,
    /// Run by its interpreter.
    Script,
    /// Unreadable, or of no known format: the kernel decides whether it can run it.
    Unknown,
}

/// The search path if the environment has none.
const DEFAULT_PATH: &str = "/bin:/usr/bin";

/// The file that a shell would start.
pub fn find(name: &OsStr, path: Option<&OsStr>) -> Result<PathBuf> {
    if name.as_bytes().contains(&b'/') {
        return Ok(name.into());
    }
    let path = path.unwrap_or(OsStr::new(DEFAULT_PATH));
    let candidates = std::env::split_paths(path).map(|folder| folder.join(name));
    match candidates.into_iter().find(|candidate| is_executable(candidate)) {
        Some(found) => Ok(found),
        None => bail!("there is no program '{}' in PATH; name it with its folder", name.display()),
    }
}

fn is_executable(path: &Path) -> bool {
    let may = rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok();
    may && path.is_file()
}

/// Looks at the file's mode and its first bytes.
pub fn examine(path: &Path) -> Program {
    let Ok(file) = File::open(path) else { return Program::Unknown };
    if let Ok(facts) = file.metadata() {
        let (user, group) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
        let other_user = facts.mode() & libc::S_ISUID != 0 && facts.uid() != user;
        let other_group = facts.mode() & libc::S_ISGID != 0 && facts.gid() != group;
        if other_user || other_group {
            return Program::Privileged;
        }
    }
    kind(&file).unwrap_or(Program::Unknown)
}

/// Bytes of an ELF header of 64 bits.
const HEADER_BYTES: usize = 64;
/// Most program headers that are examined; programs have a dozen.
const SEGMENTS_MAX: u16 = 64;
/// `PT_INTERP`: the segment that names the dynamic linker.
const INTERPRETER: u32 = 3;
/// `e_machine` of this build.
#[cfg(target_arch = "x86_64")]
const MACHINE: u16 = 62;
/// `e_machine` of this build.
#[cfg(target_arch = "aarch64")]
const MACHINE: u16 = 183;

/// `None` if the file ends too early or cannot be read.
fn kind(mut file: &File) -> Option<Program> {
    let mut header = [0; HEADER_BYTES];
    file.read_exact(&mut header[..4]).ok()?;
    if header.starts_with(b"#!") {
        return Some(Program::Script);
    }
    if header[..4] != *b"\x7fELF" {
        return Some(Program::Unknown);
    }
    file.read_exact(&mut header[4..]).ok()?;
    let (is_64_bit, is_little) = (header[4] == 2, header[5] == 1);
    if !is_64_bit || is_little != cfg!(target_endian = "little") || u16_at(&header, 18)? != MACHINE {
        return Some(Program::Foreign);
    }
    let first = u64::from_ne_bytes(header.get(32..40)?.try_into().ok()?);
    let (bytes, count) = (u64::from(u16_at(&header, 54)?), u16_at(&header, 56)?.min(SEGMENTS_MAX));
    for index in 0..u64::from(count) {
        let mut kind = [0; 4];
        file.read_exact_at(&mut kind, first.checked_add(index * bytes)?).ok()?;
        if u32::from_ne_bytes(kind) == INTERPRETER {
            return Some(Program::Dynamic);
        }
    }
    Some(Program::Static)
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn file_of(bytes: &[u8]) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    /// An ELF header with segments of the given kinds behind it.
    fn elf(machine: u16, segments: &[u32]) -> Vec<u8> {
        let mut bytes = vec![0; HEADER_BYTES];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        bytes[18..20].copy_from_slice(&machine.to_ne_bytes());
        bytes[32..40].copy_from_slice(&(HEADER_BYTES as u64).to_ne_bytes());
        bytes[54..56].copy_from_slice(&56_u16.to_ne_bytes());
        bytes[56..58].copy_from_slice(&(segments.len() as u16).to_ne_bytes());
        for segment in segments {
            bytes.extend(segment.to_ne_bytes());
            bytes.extend([0; 52]);
        }
        bytes
    }

    #[test]
    fn programs_are_told_apart_by_their_segments_and_machine() {
        for (bytes, expected) in [
            (elf(MACHINE, &[6, INTERPRETER, 1]), Program::Dynamic),
            (elf(MACHINE, &[1, 1]), Program::Static),
            (elf(3, &[INTERPRETER]), Program::Foreign),
            (b"#!/bin/sh\n".to_vec(), Program::Script),
            (b"plain text".to_vec(), Program::Unknown),
        ] {
            assert_eq!(examine(file_of(&bytes).path()), expected);
        }
        assert_eq!(examine(&std::env::current_exe().unwrap()), Program::Dynamic);
    }

    #[test]
    fn a_file_that_is_cut_off_or_lies_about_its_segments_is_unknown() {
        let whole = elf(MACHINE, &[1, 1]);
        for bytes in 0..whole.len() - 53 {
            assert!(matches!(examine(file_of(&whole[..bytes]).path()), Program::Unknown), "{bytes}");
        }
        let mut far = whole;
        far[32..40].copy_from_slice(&u64::MAX.to_ne_bytes());
        assert_eq!(examine(file_of(&far).path()), Program::Unknown);
    }

    #[test]
    fn names_are_looked_up_as_a_shell_would() {
        assert_eq!(find(OsStr::new("./there"), None).unwrap(), Path::new("./there"));
        assert!(find(OsStr::new("sh"), None).unwrap().ends_with("sh"));
        let error = find(OsStr::new("no-such-program"), Some(OsStr::new("/bin"))).unwrap_err();
        assert!(error.to_string().contains("'no-such-program' in PATH"), "{error}");
    }
}
