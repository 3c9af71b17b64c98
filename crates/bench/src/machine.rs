//! The machine that a figure was measured on, and facts about it: our user, its memory and disks, and what is
//! mounted.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

/// `f_type` of tmpfs and ramfs (linux/magic.h): file systems in memory.
const MEMORY_FILE_SYSTEMS: [u64; 2] = [0x0102_1994, 0x8584_58f6];

/// What a figure depends on besides the program.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Machine {
    /// The processor's name for itself.
    pub processor: String,
    /// Processors this process may use.
    pub cores: usize,
    /// Main memory.
    pub memory_gib: u64,
    /// The kernel's release.
    pub kernel: String,
}

impl Machine {
    /// This machine; what it does not tell is `unknown`.
    pub fn this() -> Self {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        Machine {
            processor: field(&cpuinfo, "model name").unwrap_or("unknown").to_owned(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_gib: kib(&meminfo, "MemTotal").unwrap_or(0) / (1 << 20),
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        }
    }
}

impl std::fmt::Display for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Machine { processor, cores, memory_gib, kernel } = self;
        write!(f, "{processor}, {cores} cores, {memory_gib} GiB, Linux {kernel}")
    }
}

/// What a figure is of.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Origin {
    /// The machine.
    pub machine: Machine,
    /// The commit this was built from, if the build knew it.
    pub commit: Option<String>,
}

impl Origin {
    /// This machine and this build.
    pub fn this() -> Self {
        Origin { machine: Machine::this(), commit: option_env!("FARPOOL_COMMIT").map(str::to_owned) }
    }
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let commit = self.commit.as_ref().map(|commit| format!("; commit {commit}")).unwrap_or_default();
        write!(f, "{}{commit}", self.machine)
    }
}

/// An entry of /etc/passwd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// Its name.
    pub name: String,
    /// Its user id.
    pub uid: u32,
    /// Its group id.
    pub gid: u32,
}

impl User {
    /// The first of `names` that exists.
    pub fn first_of(names: &[&str]) -> Result<Self> {
        let passwd = fs::read_to_string("/etc/passwd").context("cannot read /etc/passwd")?;
        names
            .iter()
            .find_map(|name| find_user(&passwd, name))
            .with_context(|| format!("there is no user {}", names.join(" or ")))
    }

    /// The arguments that make setpriv(1) run a program as this user.
    pub fn setpriv_args(&self) -> Vec<OsString> {
        let ids = [format!("--reuid={}", self.uid), format!("--regid={}", self.gid), "--init-groups".into()];
        ids.map(OsString::from).to_vec()
    }

    /// Gives a file or directory to this user.
    pub fn own(&self, path: &Path) -> Result<()> {
        std::os::unix::fs::chown(path, Some(self.uid), Some(self.gid))
            .with_context(|| format!("cannot give {} to user {}", path.display(), self.name))
    }
}

fn find_user(passwd: &str, name: &str) -> Option<User> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        if fields.next()? != name {
            return None;
        }
        let uid = fields.nth(1)?.parse().ok()?;
        let gid = fields.next()?.parse().ok()?;
        Some(User { name: name.into(), uid, gid })
    })
}

/// Whether we run as root.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// `MemAvailable` of the machine in MiB.
pub fn available_memory_mib() -> Result<u64> {
    let meminfo = fs::read_to_string("/proc/meminfo").context("cannot read /proc/meminfo")?;
    kib(&meminfo, "MemAvailable").map(|kib| kib / 1024).context("/proc/meminfo has no MemAvailable")
}

/// The value of a line `name: value` in a file of the kernel.
pub(crate) fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim_end() == name).then(|| value.trim())
    })
}

/// A value in KiB, as in `VmPTE: 12 kB`.
pub(crate) fn kib(text: &str, name: &str) -> Option<u64> {
    field(text, name)?.split(' ').next()?.parse().ok()
}

/// A new folder in `parent`, removed when dropped. Other users can reach its subfolders but not list them.
pub fn scratch_dir(parent: &Path, prefix: &str) -> Result<TempDir> {
    let parent = parent.canonicalize().with_context(|| format!("cannot find {}", parent.display()))?;
    let dir = tempfile::Builder::new()
        .prefix(prefix)
        .tempdir_in(&parent)
        .with_context(|| format!("cannot make a folder in {}", parent.display()))?;
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o711))?;
    Ok(dir)
}

/// An error unless `dir` is on a disk, not in memory, with `needed_mib` free.
pub fn require_disk(dir: &Path, needed_mib: u64) -> Result<()> {
    let shown = dir.display();
    let kind = rustix::fs::statfs(dir).with_context(|| format!("cannot use {shown}"))?;
    if MEMORY_FILE_SYSTEMS.contains(&(kind.f_type as u64)) {
        bail!("{shown} is in memory (tmpfs), not on a disk: choose another --work-dir");
    }
    require_space(dir, needed_mib).context("choose another --work-dir, or a smaller --scale")
}

/// An error unless `dir` has `needed_mib` free.
pub fn require_space(dir: &Path, needed_mib: u64) -> Result<()> {
    let shown = dir.display();
    let space = rustix::fs::statvfs(dir).with_context(|| format!("cannot use {shown}"))?;
    let free_mib = space.f_bavail.saturating_mul(space.f_frsize) >> 20;
    if free_mib < needed_mib {
        bail!("{shown} has {free_mib} MiB free, but {needed_mib} MiB are needed");
    }
    Ok(())
}

/// Whether something is mounted on `dir`. This includes a file system whose daemon has died, so that every
/// access fails.
pub fn is_mount_point(dir: &Path) -> bool {
    let Some(parent) = dir.parent() else { return true };
    match (fs::metadata(dir), fs::metadata(parent)) {
        (Ok(inner), Ok(outer)) => inner.dev() != outer.dev(),
        (Err(error), _) => error.kind() != std::io::ErrorKind::NotFound,
        (Ok(_), Err(_)) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_is_found_by_whole_name_only() {
        let passwd = "postgres2:x:7:8::/:/bin/sh\npostgres:x:101:104:x:/var/lib:/bin/bash\n";
        let user = find_user(passwd, "postgres").unwrap();
        assert_eq!((user.uid, user.gid), (101, 104));
        assert_eq!(find_user(passwd, "post"), None);
    }

    #[test]
    fn malformed_passwd_line_is_skipped() {
        assert_eq!(find_user("nobody:x:sixty:1::/:\nnobody\n", "nobody"), None);
    }

    #[test]
    fn fields_are_found_by_their_whole_names() {
        let meminfo = "MemTotal:  100 kB\nMemAvailable:   2048 kB\n";
        assert_eq!(kib(meminfo, "MemAvailable"), Some(2048));
        assert_eq!(kib(meminfo, "Mem"), None);
        assert_eq!(field("model name\t: A processor\n", "model name"), Some("A processor"));
        assert_eq!(field("rchar 12", "rchar"), None);
    }

    #[test]
    fn plain_directory_is_no_mount_point_but_proc_is() {
        let dir = tempfile::tempdir().unwrap();
        let inner = dir.path().join("inner");
        fs::create_dir(&inner).unwrap();
        assert!(!is_mount_point(&inner));
        assert!(is_mount_point(Path::new("/proc")));
    }

    #[test]
    fn missing_disk_space_is_refused_with_the_fix() {
        let error = require_disk(Path::new("/"), u64::MAX).unwrap_err().to_string();
        assert!(error.contains("--work-dir"), "{error}");
    }
}
