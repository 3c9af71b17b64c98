//! Looking at something again and again while work is done.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// Does `work`, and looks every so often from another thread until it ends, even by a panic: whoever panics
/// does not wait for a thread that waits for him.
pub(crate) fn looking_meanwhile<T>(
    every: Duration,
    mut look: impl FnMut() + Send,
    work: impl FnOnce() -> T,
) -> T {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            // Relaxed: the flag carries no data; the scope's end pairs with what the caller reads then.
            while !done.load(Ordering::Relaxed) {
                look();
                thread::sleep(every);
            }
        });
        let _looks_until = Raised(&done);
        work()
    })
}

/// Raises its flag when dropped.
struct Raised<'a>(&'a AtomicBool);

impl Drop for Raised<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed); // Relaxed: see `looking_meanwhile`
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::mpsc::channel;

    use super::*;

    const OFTEN: Duration = Duration::from_millis(1);

    #[test]
    fn it_looks_until_the_work_ends() {
        let (looked, looks) = channel();
        let answer = looking_meanwhile(
            OFTEN,
            || looked.send(()).unwrap(),
            || {
                (0..3).for_each(|_| looks.recv().unwrap());
                7
            },
        );
        assert_eq!(answer, 7);
    }

    #[test]
    fn work_that_panics_ends_the_looks_and_is_not_waited_for() {
        let mut looks = 0;
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            looking_meanwhile(OFTEN, || looks += 1, || panic!("on purpose"))
        }));
        assert!(panicked.is_err());
    }
}
