//! The page cache (`docs/src/cache.md`): the interposer's second backend. It serves reads of files where they
//! are, on a local disk, and announces every change of a file.
//!
//! K1. A call that may change a regular file is announced before it is made, whichever file that is: by its
//!     session, or else from outside (rule C9 of the crate `cache`). It is made exactly once. Only a process
//!     that could not open the door when it started announces nothing, as if it ran without the library.
//! K2. A read that the cache cannot serve goes to the kernel with the program's own arguments, so errors are
//!     the kernel's.
//! K3. The child of a fork has places and connections of its own. It leaves those of its parent alone.

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};

use farpool_cache::{
    CacheClient, CacheSession, DoorFile, FilePages, Replacements, at_once, change_outside, close_for_good,
    give_up_places, keep_closed, may_be_cached,
};

use crate::backend::{Given, Room, fill_from};
use crate::engine::Engine;
use crate::entry::{do_within, within};
use crate::sys;

/// The cache of one process.
pub struct Cached {
    /// The door of the files, once the cache is on. It is never freed, and the child of a fork has it, too.
    door: AtomicPtr<Arc<DoorFile>>,
    /// What the process shares, once it has used the cache. It is never freed.
    client: AtomicPtr<Arc<CacheClient>>,
    /// How often this memory was copied by a fork.
    generation: AtomicU64,
    /// Whether the process keeps the door closed. The child of a fork has the same mappings and streams.
    keeps_door_closed: AtomicBool,
    /// One more than the key of what threads hold, once the cache is on.
    key: AtomicU32,
    /// Of descriptors of the program.
    pub replacements: Replacements,
    /// While it is false, pages are neither found nor admitted. Changes are announced all the same.
    pub is_enabled: AtomicBool,
}

/// What a thread has while it makes no call: its session, with the generation of its process.
///
/// It lies behind a key of `pthread_key_create` and not in a `thread_local!`: the first use of one that has a
/// destructor allocates memory of libc's, which a signal handler must not do.
#[derive(Default)]
struct Held(Option<(u64, CacheSession)>);

impl Held {
    /// Ends a session, unless it is the parent's (K3).
    fn let_go(&mut self, generation: u64) {
        match self.0.take() {
            Some((of, session)) if of != generation => std::mem::forget(session),
            own => drop(own),
        }
    }
}

/// Called at the end of a thread.
extern "C" fn end_thread(held: *mut c_void) {
    do_within(|| {
        let engine = crate::hooks::engine();
        // Otherwise it is the parent's, in whose memory the child of a `vfork` runs.
        if engine.is_ready() && engine.process.is_owner() {
            // SAFETY: from `Box::into_raw` in `Cached::held`, and no longer behind the key.
            let mut held = unsafe { Box::from_raw(held.cast::<Held>()) };
            held.let_go(engine.cached.generation.load(Ordering::Relaxed));
        }
    });
}

/// Called by `exit`: the places of threads that go on until then are left to the daemon, or to whoever finds
/// no place.
extern "C" fn end_process() {
    do_within(|| {
        let engine = crate::hooks::engine();
        let cached = &engine.cached;
        if engine.is_ready()
            && engine.process.is_owner()
            && let Some(held) = cached.held()
        {
            // SAFETY: this thread's own, and it is within the library, so no other call of the thread uses
            // it.
            unsafe { &mut *held }.let_go(cached.generation.load(Ordering::Relaxed));
        }
    });
}

/// Called in the child of a fork, before the program runs there.
extern "C" fn note_child() {
    do_within(|| crate::hooks::engine().cached.keep_door_closed_in_child());
}

/// A descriptor of the program. `None`: it can be none.
fn borrowed<'a>(fd: RawFd) -> Option<BorrowedFd<'a>> {
    // SAFETY: the number is not -1. The program decides what it means: if the program closes it or uses it
    // for another file meanwhile, calls on it fail, or act on that file, as they would without the library.
    // The session notices that, and caches nothing then.
    (fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) })
}

impl Cached {
    /// A cache that is off.
    pub const fn off() -> Self {
        Cached {
            door: AtomicPtr::new(null_mut()),
            client: AtomicPtr::new(null_mut()),
            generation: AtomicU64::new(0),
            keeps_door_closed: AtomicBool::new(false),
            key: AtomicU32::new(0),
            replacements: Replacements::new(),
            is_enabled: AtomicBool::new(true),
        }
    }

    /// Switches the cache on, for the files in a directory. To be called once, before the program runs.
    ///
    /// # Errors
    /// If the door cannot be opened: then the cache stays off (K1).
    pub fn switch_on(&self, directory: &Path) -> io::Result<()> {
        let door = DoorFile::open(directory).map_err(io::Error::other)?.without_descriptor();
        let mut key = 0;
        // SAFETY: `key` lives until the call returns. The destructor and the handler are functions of this
        // library, which is never unloaded.
        let is_ready = unsafe {
            libc::pthread_key_create(&raw mut key, Some(end_thread)) == 0
                && libc::pthread_atfork(None, None, Some(note_child)) == 0
                && libc::atexit(end_process) == 0
        };
        if !is_ready {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        give_up_places(&door, door.places())?;
        self.key.store(key + 1, Ordering::Relaxed); // published by the store of the door
        self.door.store(Box::into_raw(Box::new(Arc::new(door))), Ordering::Release);
        Ok(())
    }

    /// Switches the cache off again, before the program runs. Nothing was announced yet.
    pub fn switch_off(&self) {
        self.door.store(null_mut(), Ordering::Release);
    }

    /// Lets the cache lose all pages.
    pub fn empty(&self) {
        if let Some(door) = self.door() {
            at_once(change_outside(&**door, async || ()));
        }
    }

    /// Lets the cache lose the pages of all files that were not signed, or were changed since. Returns how
    /// many files keep their pages.
    pub fn resume(&self) -> usize {
        let resume = |door: &Arc<DoorFile>| CacheClient::new(door.clone()).resume_files();
        within(|| self.door().map(resume)).unwrap_or_else(|| {
            self.empty();
            0
        })
    }

    /// Signs the files: this process is the last one of the database.
    pub fn sign(&self) {
        do_within(|| {
            if let Some(door) = self.door() {
                CacheClient::new(door.clone()).sign_files();
            }
        });
    }

    /// The files of which pages are cached, by their paths from the directory. `None`: the cache is closed,
    /// or its daemon does not answer.
    pub fn files(&self, engine: &Engine) -> Option<Vec<(PathBuf, FilePages)>> {
        // Otherwise this child of a fork would ask with its parent's client (K3).
        within(
            || if engine.process.start() && engine.is_ready() { self.client()?.named_files() } else { None },
        )
    }

    /// Sets whether files of the directory are pinned, up to the first that does not exist. Returns how many
    /// of them the cache knows. `None`: this process does not use the cache.
    pub fn set_pinned(
        &self,
        engine: &Engine,
        paths: impl Iterator<Item = PathBuf>,
        is_pinned: bool,
    ) -> Option<usize> {
        within(|| {
            let data = self.door()?.data();
            self.with_own_session(engine, |session| {
                let files = paths.map_while(|path| File::open(data.join(path)).ok());
                Some(files.filter(|file| session.set_pinned(file.as_fd(), is_pinned)).count())
            })
        })
    }

    /// Whether there is anything to do.
    pub fn is_on(&self) -> bool {
        !self.door.load(Ordering::Relaxed).is_null()
    }

    fn door(&self) -> Option<&Arc<DoorFile>> {
        // SAFETY: null or from `Box::into_raw` in `switch_on`, and never freed. Acquire pairs with the store
        // there.
        unsafe { self.door.load(Ordering::Acquire).as_ref() }
    }

    /// This process as a user of the cache.
    fn client(&self) -> Option<&Arc<CacheClient>> {
        let mut client = self.client.load(Ordering::Acquire);
        if client.is_null() {
            let own = Box::into_raw(Box::new(CacheClient::new(self.door()?.clone())));
            // Acquire and release pair with this exchange and with the load above in other threads.
            match self.client.compare_exchange(null_mut(), own, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => client = own,
                Err(first) => {
                    // SAFETY: from `Box::into_raw` above, and no other thread has seen it.
                    drop(unsafe { Box::from_raw(own) });
                    client = first;
                }
            }
        }
        // SAFETY: from `Box::into_raw` in this function, and never freed.
        unsafe { client.as_ref() }
    }

    /// What this thread holds. To be used within the library only, so by one call at a time.
    fn held(&self) -> Option<*mut Held> {
        let key = self.key.load(Ordering::Relaxed).checked_sub(1)?;
        // SAFETY: a key that was made in `switch_on`, and is never deleted.
        let mut held = unsafe { libc::pthread_getspecific(key) }.cast::<Held>();
        if held.is_null() {
            held = Box::into_raw(Box::default());
            // SAFETY: a key that was made in `switch_on`, and is never deleted.
            if unsafe { libc::pthread_setspecific(key, held.cast()) } != 0 {
                // SAFETY: from `Box::into_raw` just now.
                drop(unsafe { Box::from_raw(held) });
                return None;
            }
        }
        Some(held)
    }

    /// Runs a call that changes a file with the session of this thread. `None`: it has no session, or this is
    /// the child of a `vfork`. That has its parent's memory, so its parent's place, and may die within a call
    /// while the parent lives.
    fn with_own_session<T>(
        &self,
        engine: &Engine,
        call: impl FnOnce(&mut CacheSession) -> Option<T>,
    ) -> Option<T> {
        (engine.process.start() && engine.process.is_owner()).then(|| self.with_session(engine, call))?
    }

    /// Runs a call with the session of this thread, within the library. `None`: it has no session.
    fn with_session<T>(
        &self,
        engine: &Engine,
        call: impl FnOnce(&mut CacheSession) -> Option<T>,
    ) -> Option<T> {
        if !engine.process.start() || !engine.is_ready() {
            return None;
        }
        let (held, generation) = (self.held()?, self.generation.load(Ordering::Relaxed));
        // SAFETY: this thread's own, and it is within the library, so no other call of the thread uses it. It
        // lives until the thread ends.
        let held = unsafe { &mut *held };
        if held.0.as_ref().is_some_and(|(of, _)| *of != generation) {
            held.let_go(generation);
        }
        if held.0.is_none() {
            if !engine.process.is_owner() {
                return None; // the place would be that of a process that ends before its parent
            }
            let cached = &crate::hooks::engine().cached;
            let session = CacheSession::new(self.client()?, &cached.replacements, &cached.is_enabled)?;
            held.0 = Some((generation, session));
        }
        call(&mut held.0.as_mut()?.1)
    }

    /// In the child of a fork: keeps the door closed, if the parent does.
    fn keep_door_closed_in_child(&self) {
        if self.keeps_door_closed.load(Ordering::Relaxed)
            && let Some(door) = self.door()
        {
            keep_closed(door);
        }
    }

    /// Called in the child of a fork (K3).
    pub fn forget(&self) {
        self.generation.fetch_add(1, Ordering::Relaxed);
        self.client.store(null_mut(), Ordering::Release); // leaked: the parent's connections are not ended
    }

    /// Serves a positional read. `None`: the kernel is asked (K2).
    pub fn read(&self, engine: &Engine, fd: RawFd, to: &[Room<'_>], range: Range<u64>) -> Option<usize> {
        if !self.is_on() {
            return None;
        }
        within(|| {
            let open = borrowed(fd)?;
            self.with_session(engine, |session| {
                let pread = |page: &mut [u8], at| sys::read_at(fd, page, at);
                // It is fetched while the page is looked up.
                if let Some(room) = to.first() {
                    room.prefetch();
                }
                let read = session.read(open, range, pread, |at, bytes| fill_from(to, at, bytes));
                // Where nothing was read, the kernel says why: the file has ended, or there is an error.
                read.filter(|bytes| *bytes > 0).map(|bytes| bytes as usize)
            })
        })
    }

    /// Makes a call that writes to a range of a file. It gets what to write in place of the program's bytes,
    /// if `from` is one page that is to be cached.
    pub fn write(
        &self,
        engine: &Engine,
        fd: RawFd,
        range: Range<u64>,
        from: Option<Given<'_>>,
        real: impl FnOnce(Option<&[u8]>) -> isize,
    ) -> isize {
        let Some(open) = borrowed(fd) else { return real(None) };
        self.announce(engine, Some(fd), real, |session, real| {
            let fill = from.map(|from| move |page: &mut [u8]| from.copy_to(page));
            let _ = session.write(open, range, fill, real);
        })
    }

    /// Makes a call that changes a file.
    pub fn change(&self, engine: &Engine, fd: RawFd, real: impl FnOnce() -> isize) -> isize {
        let Some(open) = borrowed(fd) else { return real() };
        self.announce(
            engine,
            Some(fd),
            |_| real(),
            |session, real| {
                let _ = session.change(open, || real(None));
            },
        )
    }

    /// Makes a call that changes a file of which only the kernel knows which it is.
    pub fn change_unknown(&self, engine: &Engine, real: impl FnOnce() -> isize) -> isize {
        self.announce(
            engine,
            None,
            |_| real(),
            |session, real| {
                let _ = session.change_unknown(|| real(None));
            },
        )
    }

    /// Switches the cache off until this process has ended, if the file may be cached: it is changed by other
    /// means than calls.
    pub fn close_door_for(&self, engine: &Engine, fd: RawFd) {
        let Some(door) = self.door().filter(|_| sys::facts(fd).is_some_and(|file| file.is_regular)) else {
            return;
        };
        let closes = within(|| {
            let open = borrowed(fd)?;
            self.with_own_session(engine, |session| Some(session.close_door_for(open)))
        });
        match closes {
            // Relaxed: a child is made after this call has returned.
            Some(true) => self.keeps_door_closed.store(true, Ordering::Relaxed),
            Some(false) => {}
            // A signal handler, the child of a `vfork`, or no place is free.
            None if borrowed(fd).is_some_and(|open| may_be_cached(door, open)) => close_for_good(door),
            None => {}
        }
    }

    /// Makes a call once that changes the file behind a descriptor, announced by `announcing` or from outside
    /// (K1). A call on anything but a regular file is made outside the library: it may wait for as long as it
    /// likes, and a signal handler may interrupt it.
    fn announce(
        &self,
        engine: &Engine,
        fd: Option<RawFd>,
        real: impl FnOnce(Option<&[u8]>) -> isize,
        announcing: impl FnOnce(&mut CacheSession, &mut dyn FnMut(Option<&[u8]>) -> io::Result<usize>),
    ) -> isize {
        let Some(door) = self.door() else { return real(None) };
        let is_regular = |fd| sys::facts(fd).is_some_and(|file| file.is_regular);
        if let Some(fd) = fd.filter(|fd| !is_regular(*fd)) {
            let answer = real(None);
            // Another thread may have opened a file there meanwhile.
            if answer >= 0 && is_regular(fd) {
                let errno = sys::last_error();
                self.empty();
                sys::set_last_error(errno);
            }
            return answer;
        }
        let (mut real, mut answer) = (Some(real), None);
        within(|| {
            self.with_own_session(engine, |session| {
                announcing(session, &mut |page| {
                    let Some(real) = real.take() else { return Ok(0) };
                    let got = real(page);
                    let errno = sys::last_error();
                    answer = Some((got, errno));
                    usize::try_from(got).map_err(|_| io::Error::from_raw_os_error(errno))
                });
                Some(())
            })
        });
        match (answer, real) {
            (Some((got, errno)), _) => {
                if got < 0 {
                    sys::set_last_error(errno);
                }
                got
            }
            (None, Some(real)) => at_once(change_outside(&**door, async || real(None))),
            (None, None) => -1, // the call itself panicked
        }
    }
}
