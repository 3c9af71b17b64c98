//! Direct writes by the kernel's asynchronous I/O, as libaio makes them, beside readers that use the page
//! cache.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::support::Scratch;

const PAGE: usize = 4096;
/// Requests in flight at a time, each for a page of its own.
const DEPTH: usize = 32;
/// In each round all pages are rewritten, and read once the kernel has reported them written.
const ROUNDS: u8 = 100;
const READERS: usize = 2;
/// `IOCB_CMD_PWRITE` of `linux/aio_abi.h`.
const WRITE: u16 = 1;

/// `struct iocb` of `linux/aio_abi.h`, little-endian.
#[repr(C)]
#[derive(Default)]
struct Control {
    data: u64,
    key: u32,
    flags: u32,
    operation: u16,
    priority: i16,
    file: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    more_flags: u32,
    event_file: u32,
}

/// `struct io_event`.
#[repr(C)]
#[derive(Clone, Default)]
struct Event {
    data: u64,
    control: u64,
    result: i64,
    result2: i64,
}

/// A context of asynchronous I/O, as `io_setup` makes it.
struct Queue(libc::c_ulong);

impl Queue {
    fn new() -> Self {
        let mut context: libc::c_ulong = 0;
        // SAFETY: the kernel writes one word: `context` is one, has no other borrower, and lives until the
        // call returns.
        let made = unsafe { libc::syscall(libc::SYS_io_setup, DEPTH as libc::c_uint, &raw mut context) };
        assert_eq!(made, 0, "{}", io::Error::last_os_error());
        Queue(context)
    }

    /// Writes a page of `fill` to each page of a file, all at the same time; returns once all are written.
    fn write_all_pages(&self, file: &File, page: &mut [u8], fill: u8) {
        page.fill(fill);
        let mut controls: Vec<Control> = (0..DEPTH)
            .map(|at| Control {
                operation: WRITE,
                file: file.as_raw_fd() as u32,
                buffer: page.as_ptr() as u64,
                bytes: PAGE as u64,
                offset: (at * PAGE) as i64,
                ..Control::default()
            })
            .collect();
        let list: Vec<*mut Control> = controls.iter_mut().map(|control| &raw mut *control).collect();
        let mut events = vec![Event::default(); DEPTH];
        // SAFETY:
        // - In bounds: `list` has `DEPTH` entries, each a whole `Control` whose buffer is `page` with `PAGE`
        //   bytes; `events` has room for the `DEPTH` events that are asked for.
        // - Exclusive: this thread alone has `controls`, `page` and `events`, and writes none of them
        //   meanwhile.
        // - Alive: all of them live until `io_getevents` has returned, which waits for every submitted
        //   request. It has no deadline: giving up would free memory that the kernel still uses.
        let (submitted, ended) = unsafe {
            let count = DEPTH as libc::c_long;
            let submitted = libc::syscall(libc::SYS_io_submit, self.0, count, list.as_ptr());
            let (events, for_ever) = (events.as_mut_ptr(), std::ptr::null::<libc::timespec>());
            (submitted, libc::syscall(libc::SYS_io_getevents, self.0, submitted, submitted, events, for_ever))
        };
        assert_eq!((submitted, ended), (DEPTH as i64, DEPTH as i64), "{}", io::Error::last_os_error());
        assert!(events.iter().all(|event| event.result == PAGE as i64));
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // SAFETY: `io_setup` has made the context, which nothing else uses, and no request is in flight. No
        // memory is passed.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.0) };
    }
}

#[test]
fn readers_by_the_page_cache_see_what_asynchronous_direct_writes_have_written() {
    let dir = Scratch::new();
    let path = dir.join("file");
    std::fs::write(&path, vec![0; DEPTH * PAGE]).unwrap();
    let plain = File::open(&path).unwrap();
    let direct = File::options().write(true).custom_flags(libc::O_DIRECT).open(&path).unwrap();
    let (queue, mut room, ended) = (Queue::new(), vec![0; 2 * PAGE], AtomicBool::new(false));
    let skip = room.as_ptr().align_offset(PAGE);
    let page = &mut room[skip..skip + PAGE];
    let read_on = |ended: &AtomicBool| {
        let mut back = [0; PAGE];
        // Relaxed: the flag guards no other memory.
        while !ended.load(Ordering::Relaxed) {
            (0..DEPTH).for_each(|at| plain.read_exact_at(&mut back, (at * PAGE) as u64).unwrap());
        }
    };
    let stale = std::thread::scope(|scope| {
        for _ in 0..READERS {
            scope.spawn(|| read_on(&ended));
        }
        let mut stale = 0;
        let mut back = [0; PAGE];
        for round in 1..=ROUNDS {
            queue.write_all_pages(&direct, page, round);
            for at in 0..DEPTH {
                plain.read_exact_at(&mut back, (at * PAGE) as u64).unwrap();
                stale += usize::from(back != [round; PAGE]);
            }
        }
        ended.store(true, Ordering::Relaxed);
        stale
    });
    assert_eq!(stale, 0, "of {} pages", DEPTH * usize::from(ROUNDS));
}
