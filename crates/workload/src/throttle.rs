//! A slow disk on a fast machine: an ext4 volume on a loop device, throttled to a small cloud volume's
//! limits.
//!
//! It is a stand-in, and whatever is measured on it is said to be throttled. Needs root.
//!
//! Traps, each paid for once:
//! - with control groups of version 1 the rule stands in the *root* group: buffered writes are carried out by
//!   the kernel's own threads, which a rule in the database's group would not meet; version 2 attributes them
//!   right, and its root group takes no rules, so there the rule stands in the database's group;
//! - a rule outlives its device's user, so it is cleared before the loop device is given back;
//! - ext4 initialises its tables lazily, in the background of the first minutes, unless told otherwise;
//! - without direct I/O the loop device's backing file is cached, and the throttle governs copies between
//!   caches;
//! - whoever is killed undoes nothing, so the image is locked (flock) while its maker lives, and the next one
//!   undoes what it finds unlocked.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::cgroup::{MemoryLimit, Version};
use crate::child::run;
use crate::progress::complain;

/// Operations a second of the entry size of a cloud volume, each way.
pub const IOPS: u64 = 3000;
/// Bytes a second of the entry size of a cloud volume (125 MiB/s), each way.
pub const BYTES_PER_S: u64 = 125 << 20;
/// Root group of the version 1 controller that throttles block devices.
const BLKIO_ROOT: &str = "/sys/fs/cgroup/blkio";
/// For losetup, mkfs, mount: each writes megabytes at most.
const COMMAND_DEADLINE: Duration = Duration::from_secs(60);
/// A file system is busy for a moment after its last user has ended.
const UNMOUNT_DEADLINE: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(100);

/// Name of the file behind the device, by which a volume is known for one of these.
const IMAGE: &str = "farpool-throttled.image";

/// A file of the kernel's and the line that sets or clears a limit there.
type Rule = (PathBuf, String);

/// A mounted throttled volume; unmounted, detached and deleted when dropped.
#[derive(Debug)]
pub struct ThrottledVolume {
    image: PathBuf,
    /// Holds the lock that says that this volume is in use.
    _locked: File,
    mount_point: PathBuf,
    loop_device: Option<String>,
    clearing: Vec<Rule>,
    mounted: bool,
}

impl ThrottledVolume {
    /// Makes a volume of `size_mib` in a file in `dir` and mounts it on the existing directory `mount_point`.
    /// Undoes what killed processes have left of theirs.
    pub fn make(dir: &Path, mount_point: &Path, size_mib: u64, group: Option<&MemoryLimit>) -> Result<Self> {
        undo_leftovers();
        let image = &dir.join(IMAGE);
        let file = File::create_new(image).with_context(|| format!("cannot make {}", image.display()))?;
        file.try_lock().with_context(|| format!("cannot lock {}", image.display()))?;
        file.set_len(size_mib << 20)?;
        let mut volume = Self {
            image: image.into(),
            _locked: file,
            mount_point: mount_point.into(),
            loop_device: None,
            clearing: Vec::new(),
            mounted: false,
        };
        let attach: [&OsStr; 4] =
            ["--find".as_ref(), "--show".as_ref(), "--direct-io=on".as_ref(), image.as_ref()];
        let device = run("losetup", &attach, COMMAND_DEADLINE)?.trim().to_owned();
        volume.loop_device = Some(device.clone());
        let now = "lazy_itable_init=0,lazy_journal_init=0";
        let format: [&OsStr; 4] = ["-q".as_ref(), "-E".as_ref(), now.as_ref(), device.as_ref()];
        run("mkfs.ext4", &format, COMMAND_DEADLINE)?;
        run("mount", &[device.as_ref(), mount_point.as_ref()], COMMAND_DEADLINE)?;
        volume.mounted = true;
        volume.throttle(&device, group)?;
        Ok(volume)
    }

    fn throttle(&mut self, device: &str, group: Option<&MemoryLimit>) -> Result<()> {
        let number = device_number(device)?;
        let (setting, clearing) = match group {
            Some(group) if group.version() == Version::V2 => rules_v2(group.io_limit_file(), &number),
            _ => rules_v1(Path::new(BLKIO_ROOT), &number),
        };
        self.clearing = clearing;
        write_rules(&setting)
    }

    /// Where it is mounted.
    pub fn mount_point(&self) -> &Path {
        &self.mount_point
    }

    /// Undoes everything `make` did; tries every step even if one fails. Does nothing the second time.
    pub fn remove(&mut self) -> Result<()> {
        let cleared = write_rules(&std::mem::take(&mut self.clearing));
        let unmounted = if std::mem::take(&mut self.mounted) { self.unmount() } else { Ok(()) };
        let detached = match self.loop_device.take() {
            Some(device) => run("losetup", &["-d".as_ref(), device.as_ref()], COMMAND_DEADLINE).map(drop),
            None => Ok(()),
        };
        let deleted = match fs::remove_file(&self.image) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        };
        cleared.and(unmounted).and(detached).and(deleted).context("the throttled volume was not undone")
    }

    fn unmount(&self) -> Result<()> {
        let started = Instant::now();
        loop {
            let Err(error) = run("umount", &[self.mount_point.as_ref()], COMMAND_DEADLINE) else {
                return Ok(());
            };
            if started.elapsed() > UNMOUNT_DEADLINE {
                return Err(error);
            }
            thread::sleep(POLL);
        }
    }
}

impl Drop for ThrottledVolume {
    fn drop(&mut self) {
        if let Err(error) = self.remove() {
            complain(&format!("farpool demo: {error:#}"));
        }
    }
}

/// Undoes volumes whose makers were killed, as far as that is possible: what is left of another run is no
/// reason not to run.
fn undo_leftovers() {
    let list = ["--list", "--noheadings", "--raw", "--output", "NAME,BACK-FILE"].map(OsStr::new);
    let listed = run("losetup", &list, COMMAND_DEADLINE).unwrap_or_default();
    for (device, image) in devices_of(&listed) {
        // Held until the image is gone: another run that finds the same leftover would undo what has the
        // device by then.
        if let Some(_locked) = File::open(&image).ok().filter(|file| file.try_lock().is_ok()) {
            undo_leftover(device, &image);
        }
    }
}

fn undo_leftover(device: &str, image: &Path) {
    if let Ok(number) = device_number(device) {
        // With version 2 they went with the group.
        let _ = write_rules(&rules_v1(Path::new(BLKIO_ROOT), &number).1);
    }
    let _ = run("umount", &[device.as_ref()], COMMAND_DEADLINE); // if it was mounted
    if run("losetup", &["-d".as_ref(), device.as_ref()], COMMAND_DEADLINE).is_ok() {
        // With the folder it lies in, if that is a scratch folder as ours are.
        let folder = image.parent().filter(|folder| is_scratch(folder));
        let _ = folder.map_or_else(|| fs::remove_file(image), fs::remove_dir_all);
        complain(&format!("farpool: undone what a killed run had left: {device} on {}", image.display()));
    }
}

fn is_scratch(folder: &Path) -> bool {
    folder.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"farpool-"))
}

/// Our volumes among loop devices and their files, one a line.
fn devices_of(listed: &str) -> impl Iterator<Item = (&str, PathBuf)> {
    let pairs = listed.lines().filter_map(|line| line.split_once(' '));
    pairs.map(|(device, file)| (device, PathBuf::from(file.trim()))).filter(|(_, file)| file.ends_with(IMAGE))
}

/// `major:minor` of a block device, as the kernel's rules name it.
fn device_number(device: &str) -> Result<String> {
    let name = device.strip_prefix("/dev/").with_context(|| format!("{device} is no device"))?;
    let file = format!("/sys/block/{name}/dev");
    Ok(fs::read_to_string(&file).with_context(|| format!("cannot read {file}"))?.trim().to_owned())
}

fn rules_v1(root: &Path, number: &str) -> (Vec<Rule>, Vec<Rule>) {
    let limits =
        [("read_bps", BYTES_PER_S), ("write_bps", BYTES_PER_S), ("read_iops", IOPS), ("write_iops", IOPS)];
    let file = |name: &str| root.join(format!("blkio.throttle.{name}_device"));
    let setting = limits.iter().map(|(name, limit)| (file(name), format!("{number} {limit}"))).collect();
    let clearing = limits.iter().map(|(name, _)| (file(name), format!("{number} 0"))).collect();
    (setting, clearing)
}

fn rules_v2(file: PathBuf, number: &str) -> (Vec<Rule>, Vec<Rule>) {
    let line = |bytes: &str, operations: &str| {
        format!("{number} rbps={bytes} wbps={bytes} riops={operations} wiops={operations}")
    };
    let setting = line(&BYTES_PER_S.to_string(), &IOPS.to_string());
    (vec![(file.clone(), setting)], vec![(file, line("max", "max"))])
}

/// Writes all of them, and reports the first that the kernel refused.
fn write_rules(rules: &[Rule]) -> Result<()> {
    let mut refused = None;
    for (file, line) in rules {
        if let Err(error) = fs::write(file, line) {
            refused.get_or_insert((file, error));
        }
    }
    if let Some((file, error)) = refused {
        bail!("cannot throttle a block device: {}: {error}", file.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rule_of_version_1_that_is_set_is_cleared_too() {
        let (setting, clearing) = rules_v1(Path::new("/g"), "7:3");
        assert_eq!(setting.len(), 4);
        assert_eq!(setting[0], ("/g/blkio.throttle.read_bps_device".into(), "7:3 131072000".into()));
        assert!(clearing.iter().all(|(_, line)| line == "7:3 0"));
        let files = |rules: &[Rule]| rules.iter().map(|(file, _)| file.clone()).collect::<Vec<_>>();
        assert_eq!(files(&setting), files(&clearing));
    }

    #[test]
    fn rule_of_version_2_is_one_line_and_cleared_by_max() {
        let (setting, clearing) = rules_v2("/g/io.max".into(), "7:3");
        assert_eq!(setting[0].1, "7:3 rbps=131072000 wbps=131072000 riops=3000 wiops=3000");
        assert_eq!(clearing[0].1, "7:3 rbps=max wbps=max riops=max wiops=max");
    }

    #[test]
    fn only_devices_on_a_volumes_image_are_ours() {
        let listed = "/dev/loop0 /home/user/disk.image\n/dev/loop1 /tmp/farpool-x/farpool-throttled.image\n\
                      /dev/loop2 /tmp/not-farpool-throttled.image\n/dev/loop3\n";
        let ours: Vec<_> = devices_of(listed).collect();
        assert_eq!(ours, [("/dev/loop1", PathBuf::from("/tmp/farpool-x/farpool-throttled.image"))]);
        assert!(is_scratch(Path::new("/tmp/farpool-x")) && !is_scratch(Path::new("/tmp")));
    }

    #[test]
    fn rule_that_cannot_be_written_does_not_keep_the_others_from_being_written() {
        let dir = tempfile::tempdir().unwrap();
        let good = dir.path().join("good");
        let rules = [(dir.path().join("no/such/file"), "x".into()), (good.clone(), "7:3 0".into())];
        assert!(write_rules(&rules).is_err());
        assert_eq!(fs::read_to_string(good).unwrap(), "7:3 0");
    }
}
