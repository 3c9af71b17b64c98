//! `farpool run`: runs a program with the interposer preloaded.

mod program;

use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use farpool_cache::DoorFile;

use self::program::Program;
use crate::errors::UsageError;
use crate::output::complain;

const LIBRARY: &str = "libfarpool_preload.so";
/// Names the library's file, if it is not installed near the binary.
const LIBRARY_VARIABLE: &str = "FARPOOL_PRELOAD";
/// Tells the library which directory is cached.
const CACHE_VARIABLE: &str = "FARPOOL_CACHE";
/// What the dynamic linker loads before the libraries of a program; separated by colons or blanks, without
/// quoting.
const LINKER_VARIABLE: &str = "LD_PRELOAD";

/// Run a program on files of a mount directly, or on local files through a page cache
///
/// The program sees the same files as without `farpool run`. Its positional reads and writes (pread, pwrite
/// and their relatives), which databases use most, access far memory from within the process. All other calls
/// go through the kernel and the mount. The same holds for programs that it starts. Other files are not
/// affected, nor are programs that do not use the mount. The mount must have been started with --accelerate
/// or --accelerate-for.
///
/// Before each access the process makes one cheap system call, which checks that the descriptor still names
/// the same file. Files that it reads or writes only a few times are left to the kernel.
///
/// With --cache, the program keeps its files on the local disk, and reads them through the page cache of that
/// directory while `farpool cache attach` runs. Every program that changes files there must be run in this
/// way, by the same user: otherwise programs may read old pages. Programs that write by io_uring, aio_write
/// or raw system calls must not be run there while a cache is attached.
///
/// Statically linked programs (many in Go) and programs with set-user-id bits cannot be accelerated: they
/// work, but through the kernel.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool run pg_ctl -D /var/lib/postgresql/data start    a server, with all its processes
  farpool run --cache /srv/data sqlite3 /srv/data/bank.db  reads go to the page cache of /srv/data first
  farpool run -- fio --name=r --filename=/mnt/far/f --rw=randread --bs=8k --size=1g
  FARPOOL_PRELOAD=/opt/farpool/libfarpool_preload.so farpool run duckdb")]
pub struct RunArgs {
    /// Read files below this directory through its page cache
    #[arg(long, value_name = "DIR")]
    cache: Option<PathBuf>,

    /// The program and its arguments
    #[arg(value_name = "COMMAND", required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<OsString>,
}

/// Replaces this process by the program; returns only if that fails.
pub fn run(args: RunArgs) -> Result<()> {
    let library = library()?;
    let (name, arguments) = args.command.split_first().context("no command")?;
    let path = program::find(name, env::var_os("PATH").as_deref())?;
    warn_of(&path);
    let mut command = Command::new(&path);
    command.arg0(name).args(arguments).env(LINKER_VARIABLE, preloads(&library, env::var_os(LINKER_VARIABLE)));
    if let Some(cache) = args.cache {
        // The door exists from now on, so a directory that cannot have one is refused here.
        let door = DoorFile::open(&cache)?;
        command.env(CACHE_VARIABLE, door.data());
    }
    // `main` ignores this signal; the program must start with the default action.
    // SAFETY: the default action needs no handler, and no other thread runs.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_DFL) };
    let error = command.exec();
    Err(error).with_context(|| format!("cannot run {}", path.display()))
}

/// Warns that a program will not be accelerated. It runs all the same.
fn warn_of(path: &Path) {
    let why = match program::examine(path) {
        Program::Dynamic | Program::Script | Program::Unknown => return,
        Program::Static => "it is statically linked",
        Program::Foreign => "it was built for another architecture than this library",
        Program::Privileged => {
            "it has set-user-id or set-group-id bits, so the system preloads nothing into it"
        }
    };
    complain(format!("farpool: {} is not accelerated: {why}", path.display()));
}

fn library() -> Result<PathBuf> {
    let named = env::var_os(LIBRARY_VARIABLE).filter(|named| !named.is_empty());
    let found = match named {
        Some(named) => {
            let named = PathBuf::from(named);
            named.canonicalize().map_err(|error| {
                UsageError(format!(
                    "{LIBRARY_VARIABLE}={}: {error}; name the file {LIBRARY}, or unset the variable",
                    named.display()
                ))
            })?
        }
        None => {
            let binary = env::current_exe().context("cannot tell where this binary is")?;
            let places = places(&binary);
            match places.iter().find_map(|place| place.canonicalize().ok()) {
                Some(found) => found,
                None => bail!(
                    "{LIBRARY} is neither beside {} nor in ../lib/farpool: build it (cargo build -p farpool-preload), or \
                     set {LIBRARY_VARIABLE}",
                    binary.display()
                ),
            }
        }
    };
    if found.as_os_str().as_bytes().iter().any(|byte| matches!(byte, b':' | b' ' | b'\t' | b'\n')) {
        bail!(
            "{} cannot be preloaded: the linker takes colons and blanks for the end of a name; copy it elsewhere and \
             set {LIBRARY_VARIABLE}",
            found.display()
        );
    }
    Ok(found)
}

/// Where the library may be: in cargo's target folder, or where it is installed.
fn places(binary: &Path) -> Vec<PathBuf> {
    let Some(folder) = binary.parent() else { return Vec::new() };
    ["", "../lib/farpool", "../lib"].iter().map(|place| folder.join(place).join(LIBRARY)).collect()
}

/// Puts the library first: other preloaded libraries may come between it and libc, but not before it.
fn preloads(library: &Path, others: Option<OsString>) -> OsString {
    let mut all = library.as_os_str().to_owned();
    if let Some(others) = others.filter(|others| !others.is_empty()) {
        if others
            .as_bytes()
            .split(|byte| matches!(byte, b':' | b' '))
            .any(|other| OsStr::from_bytes(other) == all)
        {
            return others;
        }
        all.push(":");
        all.push(others);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_preloaded_libraries_come_after_the_library() {
        let library = Path::new("/lib/farpool.so");
        assert_eq!(preloads(library, None), "/lib/farpool.so");
        assert_eq!(preloads(library, Some("".into())), "/lib/farpool.so");
        assert_eq!(preloads(library, Some("/a.so /b.so".into())), "/lib/farpool.so:/a.so /b.so");
    }

    #[test]
    fn a_program_within_another_run_does_not_get_the_library_twice() {
        let library = Path::new("/lib/farpool.so");
        assert_eq!(preloads(library, Some("/lib/farpool.so:/a.so".into())), "/lib/farpool.so:/a.so");
    }

    #[test]
    fn the_library_is_looked_for_beside_the_binary_first() {
        let places = places(Path::new("/opt/far/bin/farpool"));
        assert_eq!(places[0], Path::new("/opt/far/bin/libfarpool_preload.so"));
        assert_eq!(places[1], Path::new("/opt/far/bin/../lib/farpool/libfarpool_preload.so"));
    }
}
