//! Which processes that hold places are alive.
//!
//! A holder's number is its process id and the time at which it started, because ids are reused. The daemon
//! must be in the same namespace of process ids.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::time::Timespec;

use crate::at_once;
use crate::ground::Ground;
use crate::places::Place;

/// Bits of a process id: Linux has at most 2^22 of them.
const PID_BITS: u32 = 22;
/// The start time's place among the fields of `/proc/PID/stat` behind the name of the program.
const START_TIME_FIELD: usize = 19;

/// The holder's number of this process.
///
/// # Errors
/// When `/proc` cannot be read.
pub fn this_process() -> io::Result<u64> {
    let pid = std::process::id();
    let started = start_time(pid)?.ok_or(io::ErrorKind::NotFound)?;
    Ok(u64::from(pid) | started << PID_BITS)
}

/// A number for the namespaces of process ids and of time in which this process is: start times depend on
/// both.
///
/// # Errors
/// When `/proc` cannot be read.
pub(crate) fn namespace() -> io::Result<u64> {
    let ids = std::fs::metadata("/proc/self/ns/pid")?.ino();
    // Kernels before 5.6 have no namespaces of time.
    let time = std::fs::metadata("/proc/self/ns/time").map_or(0, |time| time.ino());
    Ok(ids ^ time << 32)
}

/// The holder of places that an earlier program of a process had before an `exec`. It is never alive.
const GONE: u64 = 1;

/// Gives up the places that an earlier program of this process has left in an `exec`. To be called before
/// this program takes one.
pub fn give_up_places<G: Ground>(ground: &G, places: u32) -> io::Result<()> {
    let own = this_process()?;
    (0..places).for_each(|place| at_once(Place::new(ground, place).pass_on(own, GONE)));
    Ok(())
}

/// The process id of a holder.
pub(crate) fn pid_of(holder: u64) -> u32 {
    (holder & ((1 << PID_BITS) - 1)) as u32
}

/// The program of a process, as the kernel names it; empty if the process has ended.
pub(crate) fn program_of(pid: u32) -> String {
    let program = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    program.trim_end().to_owned()
}

/// When a process started, in clock ticks since the boot; `None`: there is no such process.
fn start_time(pid: u32) -> io::Result<Option<u64>> {
    let stat = match std::fs::read(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat,
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) => return Ok(None),
        Err(error) => return Err(error),
    };
    let stat = String::from_utf8_lossy(&stat); // the name of the program may be anything
    let fields = stat.rsplit_once(')').map(|(_, fields)| fields.split_ascii_whitespace());
    let started = fields.and_then(|mut fields| fields.nth(START_TIME_FIELD)?.parse().ok());
    started.map(Some).ok_or(io::ErrorKind::InvalidData.into())
}

/// The holders that were seen alive.
#[derive(Debug, Default)]
pub struct Living {
    known: RefCell<BTreeMap<u64, OwnedFd>>,
}

impl Living {
    /// Whether a holder is alive. If that cannot be found out, it counts as alive.
    pub fn is_alive(&self, holder: u64) -> bool {
        if holder == GONE {
            return false;
        }
        let mut known = self.known.borrow_mut();
        let is_alive = match known.get(&holder) {
            Some(process) => !has_ended(process),
            None => match find(holder) {
                Ok(Some(process)) => {
                    known.insert(holder, process);
                    true
                }
                Ok(None) => false,
                Err(_) => true, // such as a shortage of descriptors
            },
        };
        if !is_alive {
            known.remove(&holder);
        }
        is_alive
    }
}

/// A descriptor of the holder; `None`: it has ended.
fn find(holder: u64) -> io::Result<Option<OwnedFd>> {
    let pid = pid_of(holder);
    let Some(raw) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
    let process = match pidfd_open(raw, PidfdFlags::empty()) {
        Ok(process) => process,
        Err(rustix::io::Errno::SRCH) => return Ok(None),
        Err(errno) => return Err(errno.into()),
    };
    // Read afterwards: if the process that has the id now started at that time, the descriptor is its.
    // If `/proc` hides it (`hidepid`), it counts as the holder while it lives.
    let is_it = start_time(pid)?.is_none_or(|started| started == holder >> PID_BITS);
    Ok((is_it && !has_ended(&process)).then_some(process))
}

fn has_ended(process: &OwnedFd) -> bool {
    let mut look = [PollFd::from_borrowed_fd(process.as_fd(), PollFlags::IN)];
    let looked = poll(&mut look, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    looked.is_ok() && !look[0].revents().is_empty()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::door::DoorFile;

    #[test]
    fn a_holder_is_alive_until_its_process_ends_and_no_other_with_its_id_is_taken_for_it() {
        let living = Living::default();
        let own = this_process().unwrap();
        assert!(living.is_alive(own));
        assert!(!living.is_alive(own + (1 << PID_BITS)), "started a tick later");
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let holder = u64::from(child.id()) | start_time(child.id()).unwrap().unwrap() << PID_BITS;
        assert!(living.is_alive(holder) && living.is_alive(holder));
        child.kill().unwrap();
        // The process has ended, but its id is not free yet.
        while living.is_alive(holder) {
            std::thread::yield_now();
        }
        assert!(!Living::default().is_alive(holder));
        child.wait().unwrap();
        assert!(!living.is_alive(holder) && !living.is_alive(0));
    }

    #[test]
    fn places_that_an_earlier_program_of_a_process_has_left_belong_to_nobody_alive() {
        let (dir, data) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let door = DoorFile::open_in(dir.path(), data.path()).unwrap();
        let (own, other) = (this_process().unwrap(), 7 << PID_BITS);
        for (place, holder) in [(0, own), (1, other), (2, own)] {
            assert!(at_once(Place::new(&door, place).take(holder)));
        }
        give_up_places(&door, door.places()).unwrap();
        let holders = [0, 1, 2, 3].map(|place| at_once(Place::new(&door, place).holder()));
        assert_eq!(holders, [GONE, other, GONE, 0]);
        assert!(!Living::default().is_alive(GONE));
    }
}
