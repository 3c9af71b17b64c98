//! Checks of a directory whose files are to be cached.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use farpool_cache::{DoorError, DoorFile, look_at};
use rustix::fs::{AtFlags, StatxFlags, statx};

use super::Check;

/// The module is recognised by this in the name of its file.
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

fn door(found: Result<Option<DoorFile>, DoorError>, dir: &Path) -> Check {
    let name = "cache door";
    match found {
        Ok(Some(door)) if !door.shares_process_ids() => Check::fail(
            name,
            "it was made in another namespace of process ids, such as a container",
            "run the cache there, or stop the programs that use the files, and remove the door",
        ),
        Ok(Some(door)) => match look_at(&door) {
            Ok((word, _)) => state(word, door.status().outsiders, dir),
            Err(error) => Check::warn(name, error.to_string(), "run this as the owner of the files"),
        },
        Ok(None) => Check::warn(name, "no program has used the cache", attach(dir)),
        Err(error) => {
            let fix = "run this as root or as the owner of the files, or do what the message says";
            Check::fail(name, error.to_string(), fix)
        }
    }
}

fn attach(dir: &Path) -> String {
    format!("farpool cache attach {} --memory SIZE", dir.display())
}

fn state(word: &str, outsiders: u64, dir: &Path) -> Check {
    let name = "cache door";
    let found = format!("{word}{}", crate::cache::explain(word, outsiders));
    match word {
        "open" => Check::ok(name, "open: pages are found in far memory"),
        "detached" | "abandoned" => Check::warn(name, found, attach(dir)),
        _ => Check::warn(name, found, format!("farpool cache status {}", dir.display())),
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
    match maps {
        Ok(maps) => match maps.lines().filter_map(mapped_file).find(|path| is_module(path)) {
            Some(path) => {
                Check::ok(name, format!("the server has loaded {path}; its log says whether it caches"))
            }
            None => Check::warn(
                name,
                format!("the server has loaded no library with `{MODULE}` in its name"),
                "name it in shared_preload_libraries in postgresql.conf, and restart the server",
            ),
        },
        Err(error) => Check::warn(name, error.to_string(), "run this as root or as the server's user"),
    }
}

/// The path at the end of a line of `/proc/PID/maps`.
fn mapped_file(line: &str) -> Option<&str> {
    line.find('/').map(|start| &line[start..])
}

fn is_module(path: &str) -> bool {
    let name = Path::new(path).file_name().and_then(OsStr::to_str).unwrap_or_default();
    name.contains(MODULE) && name.contains(".so")
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
    fn a_server_without_the_module_is_a_warning_and_io_uring_a_failure() {
        let loaded = module_in(maps("/opt/my farpool/libfarpool_postgres.so"));
        assert_eq!(loaded.state, State::Ok);
        assert!(loaded.found.contains("/opt/my farpool/libfarpool_postgres.so;"), "{loaded:?}");
        assert_eq!(module_in(maps("/opt/farpool/other.so")).state, State::Warn);
        assert_eq!(module_in(Err(io::ErrorKind::PermissionDenied.into())).state, State::Warn);
        assert_eq!(method_of(Ok(vec!["/dev/null".into()])).state, State::Ok);
        assert_eq!(method_of(Ok(vec!["/dev/null".into(), RING.into()])).state, State::Fail);
        assert_eq!((births(Ok(true)).state, births(Ok(false)).state), (State::Ok, State::Fail));
    }

    #[test]
    fn a_door_that_is_not_open_is_a_warning_and_names_the_command() {
        let dir = Path::new("/srv/data");
        let fix = |word| {
            let check = state(word, 0, dir);
            assert_eq!(check.state, if check.fix.is_some() { State::Warn } else { State::Ok });
            check.fix
        };
        let attach = Some("farpool cache attach /srv/data --memory SIZE".to_owned());
        assert_eq!(fix("open"), None);
        assert_eq!((fix("detached"), fix("abandoned")), (attach.clone(), attach));
        let status = Some("farpool cache status /srv/data".to_owned());
        assert_eq!((fix("closed"), fix("silent")), (status.clone(), status));
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
