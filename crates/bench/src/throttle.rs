//! A slow disk on a fast machine: a [`LoopVolume`] that is throttled to the limits of a small cloud
//! volume.
//!
//! It is a substitute; whatever is measured on it is labelled as throttled. Needs root.
//!
//! Pitfalls, each found the hard way:
//! - With control groups of version 1 the rule is in the *root* group: the kernel's own threads carry out
//!   buffered writes, and a rule in the database's group would not apply to them. Version 2 attributes these
//!   writes to the database's group; its root group takes no rules, so there the rule is in the database's
//!   group.
//! - A rule outlives the use of its device, so it is cleared before the loop device is detached.
//! - A killed process cleans up nothing. So it holds a lock (flock) on the image while it lives, and the next
//!   run removes volumes whose image is not locked.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::cgroup::{MemoryLimit, Version};
use crate::child::run;
use crate::loop_volume::{COMMAND_DEADLINE, LoopVolume};
use crate::progress::warn;

/// Operations per second of the smallest usual cloud volume, in each direction.
pub const IOPS: u64 = 3000;
/// Bytes per second of the smallest usual cloud volume (125 MiB/s), in each direction.
pub const BYTES_PER_S: u64 = 125 << 20;
/// Root group of the version 1 controller that throttles block devices.
const BLKIO_ROOT: &str = "/sys/fs/cgroup/blkio";
/// Name of the file behind the device; it identifies these volumes.
const IMAGE: &str = "farpool-throttled.image";

/// A file of the kernel, and the line that sets or clears a limit there.
type Rule = (PathBuf, String);

/// A mounted throttled volume. Dropping it unmounts, detaches and deletes it.
#[derive(Debug)]
pub struct ThrottledVolume {
    image: PathBuf,
    /// Holds the lock that marks this volume as in use.
    _locked: File,
    volume: Option<LoopVolume>,
    mount_point: PathBuf,
    clearing: Vec<Rule>,
}

impl ThrottledVolume {
    /// Makes a volume of `size_mib` in a file in `dir` and mounts it on the existing directory `mount_point`.
    /// Removes volumes that killed processes left behind.
    pub fn make(dir: &Path, mount_point: &Path, size_mib: u64, group: Option<&MemoryLimit>) -> Result<Self> {
        undo_leftovers();
        let image = &dir.join(IMAGE);
        let file = File::create_new(image).with_context(|| format!("cannot make {}", image.display()))?;
        file.try_lock().with_context(|| format!("cannot lock {}", image.display()))?;
        file.set_len(size_mib << 20)?;
        let mut throttled = Self {
            image: image.into(),
            _locked: file,
            volume: None,
            mount_point: mount_point.into(),
            clearing: Vec::new(),
        };
        let volume = throttled.volume.insert(LoopVolume::make(image, mount_point)?);
        let device = volume.device()?.to_owned();
        throttled.throttle(&device, group)?;
        Ok(throttled)
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

    /// Undoes everything that `make` did, and tries every step even if one fails. A second call does nothing.
    pub fn remove(&mut self) -> Result<()> {
        let cleared = write_rules(&std::mem::take(&mut self.clearing));
        let removed = self.volume.take().map_or(Ok(()), |mut volume| volume.remove());
        let deleted = match fs::remove_file(&self.image) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        };
        cleared.and(removed).and(deleted).context("cannot remove the throttled volume")
    }
}

impl Drop for ThrottledVolume {
    fn drop(&mut self) {
        if let Err(error) = self.remove() {
            warn(&format!("{error:#}"));
        }
    }
}

/// Removes the volumes of killed processes as far as possible; a failure is no reason not to run.
fn undo_leftovers() {
    let list = ["--list", "--noheadings", "--raw", "--output", "NAME,BACK-FILE"].map(OsStr::new);
    let listed = run("losetup", &list, COMMAND_DEADLINE).unwrap_or_default();
    for (device, image) in devices_of(&listed) {
        // Locked until the image is deleted. Otherwise another run that finds the same leftover could detach
        // the device after its number was reused.
        if let Some(_locked) = File::open(&image).ok().filter(|file| file.try_lock().is_ok()) {
            undo_leftover(device, &image);
        }
    }
}

fn undo_leftover(device: &str, image: &Path) {
    if let Ok(number) = device_number(device) {
        // With version 2 the rules were removed with the group.
        let _ = write_rules(&rules_v1(Path::new(BLKIO_ROOT), &number).1);
    }
    let _ = run("umount", &[device.as_ref()], COMMAND_DEADLINE); // fails if it was not mounted
    if run("losetup", &["-d".as_ref(), device.as_ref()], COMMAND_DEADLINE).is_ok() {
        // Deletes the image with its folder, if that is a scratch folder of ours.
        let folder = image.parent().filter(|folder| is_scratch(folder));
        let _ = folder.map_or_else(|| fs::remove_file(image), fs::remove_dir_all);
        warn(&format!("removed what a killed run left behind: {device} on {}", image.display()));
    }
}

fn is_scratch(folder: &Path) -> bool {
    folder.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"farpool-"))
}

/// Parses losetup's list, one device and its file per line, and returns our volumes.
fn devices_of(listed: &str) -> impl Iterator<Item = (&str, PathBuf)> {
    let pairs = listed.lines().filter_map(|line| line.split_once(' '));
    pairs.map(|(device, file)| (device, PathBuf::from(file.trim()))).filter(|(_, file)| file.ends_with(IMAGE))
}

/// `major:minor` of a block device, as the kernel's rules name it.
fn device_number(device: &str) -> Result<String> {
    let name = device.strip_prefix("/dev/").with_context(|| format!("{device} is not a device"))?;
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

/// Writes all rules, and returns the first refusal of the kernel.
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
    fn every_rule_of_version_1_is_cleared_too() {
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
    fn all_other_rules_are_written_if_one_cannot_be() {
        let dir = tempfile::tempdir().unwrap();
        let good = dir.path().join("good");
        let rules = [(dir.path().join("no/such/file"), "x".into()), (good.clone(), "7:3 0".into())];
        assert!(write_rules(&rules).is_err());
        assert_eq!(fs::read_to_string(good).unwrap(), "7:3 0");
    }
}
