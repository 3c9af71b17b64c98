//! Runs a probe again and again while work is done.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// Runs `work`, and calls `look` every so often from another thread until `work` ends, also by a panic.
/// Without that, a panic would leave the scope waiting for that thread for ever.
pub(crate) fn looking_meanwhile<T>(
    every: Duration,
    mut look: impl FnMut() + Send,
    work: impl FnOnce() -> T,
) -> T {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            // Relaxed: the flag carries no data; the scope's end orders what the caller reads afterwards.
            while !done.load(Ordering::Relaxed) {
                look();
                thread::sleep(every);
            }
        });
        let _looks_until = Raised(&done);
        work()
    })
}

/// Sets its flag when dropped.
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
    fn probe_is_called_until_the_work_ends() {
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
    fn panic_of_the_work_ends_the_calls_of_the_probe() {
        let mut looks = 0;
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            looking_meanwhile(OFTEN, || looks += 1, || panic!("on purpose"))
        }));
        assert!(panicked.is_err());
    }
}
