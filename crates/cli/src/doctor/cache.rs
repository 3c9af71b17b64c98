//! Checks of a directory whose files are to be cached.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use farpool_cache::{Door, DoorFile, DoorStatus};
use rustix::fs::{AtFlags, StatxFlags, statx};

use super::Check;

/// The name of each file of the module, as it was built or renamed, has this in it.
const MODULE: &str = "farpool";
const PROCESSES: &str = "/proc";
/// What the kernel calls the descriptor of an `io_uring`.
const RING: &str = "anon_inode:[io_uring]";

/// All checks of a directory.
pub fn directory(dir: &Path) -> Vec<Check> {
    let Ok(data) = dir.canonicalize() else {
        let found = format!("there is no directory {}", dir.display());
        return vec![Check::fail("cached directory", found, "name the directory with the files")];
    };
    let mut checks = vec![births(records_births(&data)), door(DoorFile::find(&data), dir)];
    if data.join("PG_VERSION").exists() {
        match postmaster(&data) {
            Some(process) => checks.extend([module(&process), method(&process)]),
            None => {
                let fix = "start it: its log says whether its files are cached";
                checks.push(Check::warn("cache module", "the server does not run", fix));
            }
        }
    }
    checks
}

/// Whether the file system says when a file was made. Otherwise a new file cannot be told from an old one.
fn records_births(data: &Path) -> io::Result<bool> {
    let found = statx(rustix::fs::CWD, data, AtFlags::empty(), StatxFlags::BTIME)?;
    Ok(found.stx_mask & StatxFlags::BTIME.bits() != 0)
}

fn births(records: io::Result<bool>) -> Check {
    let name = "cached files";
    let fix = "only files with a time of birth are cached: move them to ext4, XFS or Btrfs";
    match records {
        Ok(true) => Check::ok(name, "the file system records when files were made"),
        Ok(false) => Check::fail(name, "the file system does not record when files were made", fix),
        Err(error) => Check::fail(name, error.to_string(), "run this as the owner of the files"),
    }
}

fn door(found: Result<Option<DoorFile>, farpool_cache::DoorError>, dir: &Path) -> Check {
    let name = "cache door";
    match found {
        Ok(Some(door)) if !door.shares_process_ids() => Check::fail(
            name,
            "it was made in another namespace of process ids, such as a container",
            "run the cache there, or stop the programs that use the files, and remove the door",
        ),
        Ok(Some(door)) => state(door.status(), dir),
        Ok(None) => Check::warn(name, "no program has used the cache", attach(dir)),
        Err(error) => Check::fail(name, error.to_string(), "see `farpool cache attach --help`"),
    }
}

fn attach(dir: &Path) -> String {
    format!("farpool cache attach {} --memory SIZE", dir.display())
}

fn state(status: DoorStatus, dir: &Path) -> Check {
    let name = "cache door";
    match status.door {
        Door::Open => Check::ok(name, "open: pages are found in far memory"),
        _ if status.outsiders > 0 => Check::warn(
            name,
            format!("closed while {} processes change files without a place", status.outsiders),
            "if it stays closed, stop the programs that use the files, and remove the door",
        ),
        _ => Check::warn(name, "closed: all pages are read from the disk", attach(dir)),
    }
}

/// The folder in `/proc` of the server that has this data directory, if it runs.
fn postmaster(data: &Path) -> Option<PathBuf> {
    let file = fs::read_to_string(data.join("postmaster.pid")).ok()?;
    let pid: u32 = file.lines().next()?.trim().parse().ok()?;
    let process = Path::new(PROCESSES).join(pid.to_string());
    // Another process may have the number of a server that was killed. A server works in its data directory.
    let works_in = fs::read_link(process.join("cwd"));
    works_in
        .map_or_else(|error| error.kind() == io::ErrorKind::PermissionDenied, |found| found == data)
        .then_some(process)
}

fn module(process: &Path) -> Check {
    let maps = fs::read_to_string(process.join("maps"));
    module_in(maps)
}

fn module_in(maps: io::Result<String>) -> Check {
    let name = "cache module";
    let is_module = |line: &&str| {
        let file = line.split_whitespace().nth(5).map(Path::new).and_then(Path::file_name);
        file.and_then(OsStr::to_str).is_some_and(|file| file.contains(MODULE) && file.contains(".so"))
    };
    match maps {
        Ok(maps) => match maps.lines().find(is_module).and_then(|line| line.split_whitespace().nth(5)) {
            Some(path) => Check::ok(name, format!("the server has loaded {path}")),
            None => Check::fail(
                name,
                "the server runs without the module",
                "name it in shared_preload_libraries in postgresql.conf, and restart the server",
            ),
        },
        Err(error) => Check::warn(name, error.to_string(), "run this as root or as the server's user"),
    }
}

fn method(process: &Path) -> Check {
    let links = fs::read_dir(process.join("fd")).map(|descriptors| {
        descriptors.flatten().filter_map(|descriptor| fs::read_link(descriptor.path()).ok()).collect()
    });
    method_of(links)
}

fn method_of(descriptors: io::Result<Vec<PathBuf>>) -> Check {
    let name = "asynchronous reads";
    match descriptors {
        Ok(links) if links.iter().any(|link| link.as_os_str() == RING) => Check::fail(
            name,
            "the server reads by io_uring, which goes round the cache",
            "set io_method = worker or sync, and restart the server",
        ),
        Ok(_) => Check::ok(name, "none that go round the cache"),
        Err(error) => Check::warn(name, error.to_string(), "run this as root or as the server's user"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    fn maps(path: &str) -> io::Result<String> {
        Ok(format!(
            "7f00-7f01 r-xp 00000000 fe:00 12    /usr/lib/libc.so.6\n7f02-7f03 r-xp 00 fe:00 13  {path}\n"
        ))
    }

    #[test]
    fn a_server_without_the_module_or_with_io_uring_fails() {
        assert_eq!(module_in(maps("/opt/farpool/libfarpool_postgres.so")).state, State::Ok);
        assert_eq!(module_in(maps("/opt/farpool/other.so")).state, State::Fail);
        assert_eq!(module_in(Err(io::ErrorKind::PermissionDenied.into())).state, State::Warn);
        assert_eq!(method_of(Ok(vec!["/dev/null".into()])).state, State::Ok);
        assert_eq!(method_of(Ok(vec!["/dev/null".into(), RING.into()])).state, State::Fail);
        assert_eq!((births(Ok(true)).state, births(Ok(false)).state), (State::Ok, State::Fail));
    }

    #[test]
    fn a_closed_door_is_a_warning_and_names_the_command() {
        let closed = state(DoorStatus::default(), Path::new("/srv/data"));
        assert_eq!(closed.state, State::Warn);
        assert_eq!(closed.fix.as_deref(), Some("farpool cache attach /srv/data --memory SIZE"));
        let open = state(DoorStatus { door: Door::Open, ..DoorStatus::default() }, Path::new("/srv/data"));
        assert_eq!(open.state, State::Ok);
        let outsiders = state(DoorStatus { outsiders: 2, ..DoorStatus::default() }, Path::new("/srv/data"));
        assert!(outsiders.found.contains("2 processes"), "{outsiders:?}");
    }

    #[test]
    fn a_directory_that_does_not_exist_fails_and_one_without_a_server_has_no_module() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(directory(&dir.path().join("none"))[0].state, State::Fail);
        let names = |dir: &Path| directory(dir).iter().map(|check| check.name).collect::<Vec<_>>();
        assert_eq!(names(dir.path()), ["cached files", "cache door"]);
        fs::write(dir.path().join("PG_VERSION"), "15\n").unwrap();
        fs::write(dir.path().join("postmaster.pid"), format!("{}\n", std::process::id())).unwrap();
        let checks = directory(dir.path());
        assert_eq!((checks[2].name, checks[2].found.as_str()), ("cache module", "the server does not run"));
    }
}
