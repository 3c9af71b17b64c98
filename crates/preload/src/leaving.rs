//! Descriptors that are closed, copied, mapped, passed on, or left open for another program.

use std::os::fd::RawFd;
use std::sync::atomic::Ordering;

use crate::engine::Engine;
use crate::entry::{do_within, within};
use crate::sys;
use crate::table::{Pin, Slot, flag};

impl Engine {
    /// Runs `real`, which closes the descriptor. The table entry goes first, the guard last, so that the
    /// program sees what `close` reports of earlier writes.
    pub fn close<T>(&self, fd: RawFd, real: impl FnOnce() -> T) -> T {
        if !self.table.is_known(fd) {
            self.table.forget_plain(fd, fd);
            let id = if self.may_keep() { within(|| sys::file_id(fd)) } else { None };
            let answer = real();
            if let Some(id) = id {
                within(|| self.if_own(|| self.table.let_go(id)));
            }
            return answer;
        }
        let ended = self.end(fd);
        let answer = real();
        self.ended(ended);
        answer
    }

    /// Whether there may be guards that are kept because of record locks.
    fn may_keep(&self) -> bool {
        self.takes_record_locks.load(Ordering::Relaxed) && self.table.live() != 0
    }

    /// Runs `real`, which makes the descriptor `new` a copy of `old`.
    pub fn replace(&self, old: RawFd, new: RawFd, real: impl FnOnce() -> i32) -> i32 {
        if old == new {
            return real();
        }
        let ended = if self.table.is_known(new) { self.end(new) } else { None };
        let answer = real();
        match ended {
            Some(pin) if answer < 0 => self.table.put(new, pin),
            ended => self.ended(ended),
        }
        if answer >= 0 {
            self.copied(old, new);
        }
        answer
    }

    /// Notes that the descriptor `new` has become a copy of `old`. If it belongs to a mount and was not
    /// registered, it is registered now; otherwise the copies of a description would not know of each other.
    pub fn copied(&self, old: RawFd, new: RawFd) {
        if !self.table.is_known(new) {
            self.table.forget_plain(new, new);
        }
        if !self.is_ours(old) && !self.table.is_known(new) {
            if self.table.is_plain(old) {
                self.table.set_plain(new);
            }
            return;
        }
        within(|| {
            if !self.is_ready() || !self.process.is_owner() {
                return None;
            }
            if let Slot::Known(stale) = self.table.look(new) {
                self.lost(new, &stale);
            }
            self.found(old).map(|pin| self.table.put(new, pin))
        });
    }

    /// Runs `real`, which closes all descriptors of a range, both ends included.
    pub fn close_range(&self, first: u32, last: u32, real: impl FnOnce() -> bool) {
        if !real() {
            return;
        }
        let clamp = |number: u32| RawFd::try_from(number).unwrap_or(RawFd::MAX);
        let (first, last) = (clamp(first), clamp(last));
        self.table.forget_plain(first, last);
        if self.table.live() == 0 {
            return;
        }
        within(|| {
            self.if_own(|| {
                self.table.lose_guards(first, last);
                for fd in self.table.numbers(first, last) {
                    if let Some(pin) = self.table.take(fd) {
                        self.drop_closed(pin);
                    }
                }
            })
        });
    }

    fn if_own<T>(&self, work: impl FnOnce() -> T) -> Option<T> {
        (self.is_ready() && self.process.is_owner()).then(work)
    }

    fn end(&self, fd: RawFd) -> Option<Pin<'_>> {
        within(|| {
            let pin = self.if_own(|| self.table.take(fd))??;
            let stale = !self.is_still(fd, &pin);
            if stale && self.takes_record_locks.load(Ordering::Relaxed) {
                pin.set(flag::KEPT);
            }
            Some(pin)
        })
    }

    fn ended(&self, pin: Option<Pin<'_>>) {
        if let Some(pin) = pin {
            do_within(|| self.drop_closed(pin));
        }
    }

    /// Drops the state of a number that the program has closed.
    fn drop_closed(&self, pin: Pin<'_>) {
        let id = pin.id();
        drop(pin);
        if self.may_keep() {
            self.table.let_go(id);
        }
    }

    /// The description that a number names, however the number came to name it.
    fn described(&self, fd: RawFd) -> Option<Pin<'_>> {
        if self.table.live() == 0 || !self.is_ready() {
            return None;
        }
        match self.table.look(fd) {
            Slot::Known(pin) if self.is_still(fd, &pin) => Some(pin),
            _ => self.shared(fd),
        }
    }

    /// Whether the description is registered, and open for what is `needed`.
    pub fn is_served(&self, fd: RawFd, needed: u32) -> bool {
        within(|| self.described(fd).filter(|pin| pin.has(needed) && !pin.has(flag::ENDING)).map(drop))
            .is_some()
    }

    /// As [`described`](Self::described), but registers a descriptor that is not known yet.
    fn found(&self, fd: RawFd) -> Option<Pin<'_>> {
        self.described(fd).or_else(|| {
            if let Slot::Known(stale) = self.table.look(fd) {
                self.lost(fd, &stale);
            }
            self.pinned(fd)
        })
    }

    /// Gives up acceleration of a description for good: first here, then with the mount, which waits for
    /// operations in flight, and tells the kernel the size that they have given the file.
    pub(crate) fn give_up(&self, fd: RawFd, pin: &Pin<'_>) {
        if pin.has(flag::GIVEN_UP) {
            return;
        }
        pin.set(flag::ENDING);
        self.backend().unregister(fd);
        if !pin.has(flag::WANTS_DIRECT)
            && let Some(status) = sys::status_flags(fd)
        {
            sys::fcntl(fd, libc::F_SETFL, (status & !libc::O_DIRECT) as usize);
        }
        pin.set(flag::GIVEN_UP);
    }

    /// Gives up acceleration of a descriptor that is about to be mapped, passed to another process, or
    /// written to at the end that the kernel remembers. A description that is not registered yet must not be
    /// registered later, so the mount is told of that one, too.
    pub fn give_away(&self, fd: RawFd) {
        do_within(|| self.bar(fd));
    }

    fn bar(&self, fd: RawFd) {
        if let Some(pin) = self.described(fd) {
            self.give_up(fd, &pin);
        } else if self.backend().recognises(fd) {
            self.backend().unregister(fd);
        }
    }

    /// Gives up acceleration of every descriptor that another program is about to inherit, because `exec`
    /// does not close it.
    pub fn leave(&self) {
        do_within(|| self.bar_all(|fd| sys::ends_at_exec(fd) == Some(false)));
    }

    /// As [`leave`](Self::leave), for a spawned program, which also gets copies of descriptors made for it.
    pub fn leave_with_copies(&self) {
        do_within(|| self.bar_all(|fd| sys::ends_at_exec(fd) == Some(false) || self.is_copied(fd)));
    }

    fn bar_all(&self, leaves: impl Fn(RawFd) -> bool) {
        sys::each_open(|fd| {
            if leaves(fd) {
                self.bar(fd);
            }
        });
    }

    /// Notes that a spawned program will get a copy of this number. The note is never removed: at a later
    /// spawn, acceleration of what the number then names may be given up without need.
    pub fn will_copy(&self, fd: RawFd) {
        if let Some((word, bit)) = place(fd)
            && let Some(word) = self.copied.get(word)
        {
            word.fetch_or(bit, Ordering::Relaxed);
        }
    }

    fn is_copied(&self, fd: RawFd) -> bool {
        let word = place(fd).and_then(|(word, bit)| Some((self.copied.get(word)?, bit)));
        word.is_some_and(|(word, bit)| word.load(Ordering::Relaxed) & bit != 0)
    }

    /// The flags that `F_GETFL` returns to the program: without the bit that the library has set.
    pub fn program_flags(&self, fd: RawFd, status: i32) -> i32 {
        if status < 0 || status & libc::O_DIRECT == 0 || self.table.live() == 0 {
            return status;
        }
        let is_set_here = within(|| {
            let pin = self.described(fd)?;
            (!pin.has(flag::WANTS_DIRECT) && !pin.has(flag::GIVEN_UP)).then_some(())
        });
        if is_set_here.is_some() { status & !libc::O_DIRECT } else { status }
    }

    /// Runs `real`, an `F_SETFL`, with the flags that the program wants and those that the library needs. A
    /// descriptor of a mount is registered for that: another process may have set `O_DIRECT` on its
    /// description, and still need it.
    pub fn set_flags(&self, fd: RawFd, wanted: i32, real: impl FnOnce(i32) -> i32) -> i32 {
        let pin = if self.table.is_plain(fd) { None } else { within(|| self.found(fd)) };
        let Some(pin) = pin else { return real(wanted) };
        if wanted & libc::O_APPEND != 0 {
            do_within(|| self.give_up(fd, &pin));
        }
        let needed = if pin.has(flag::ENDING) { 0 } else { libc::O_DIRECT };
        let answer = real(wanted | needed);
        if answer == 0 {
            if wanted & libc::O_DIRECT != 0 {
                pin.set(flag::WANTS_DIRECT)
            } else {
                pin.clear(flag::WANTS_DIRECT)
            }
        }
        do_within(|| drop(pin));
        answer
    }

    /// Notes that the program takes record locks; see [`flag::KEPT`].
    pub fn note_record_locks(&self) {
        self.takes_record_locks.store(true, Ordering::Relaxed);
    }
}

fn place(fd: RawFd) -> Option<(usize, u64)> {
    let number = usize::try_from(fd).ok()?;
    let bits = u64::BITS as usize;
    Some((number / bits, 1 << (number % bits)))
}
