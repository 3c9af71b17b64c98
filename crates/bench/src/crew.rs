//! The threads of a measurement of transactions: services that run throughout, and workers that measure.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Builder;

use anyhow::{Context, Result, anyhow};
use farpool_txn::Traffic;

use crate::meeting::{Meeting, Seat};
use crate::service::Service;
use crate::site::Site;

/// Who takes part.
pub struct Crew<'a> {
    /// Their far memory.
    pub site: &'a Site,
    /// Ends everything early.
    pub stop: &'a AtomicBool,
    /// Run until all workers are done, and what they did is checked.
    pub services: Vec<Service>,
    /// How many threads measure.
    pub workers: usize,
}

/// What came of it.
pub struct Done<T> {
    /// Of each worker.
    pub workers: Vec<T>,
    /// Of all services.
    pub service_traffic: Traffic,
}

impl Crew<'_> {
    /// Runs services and workers, and checks what these have done before the services end.
    pub fn run<T: Send>(
        &self,
        worker: impl Fn(usize, &Seat<'_>) -> Result<T> + Sync,
        check: impl FnOnce(&[T]) -> Result<()>,
    ) -> Result<Done<T>> {
        let meeting = Meeting::new(self.stop);
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let serve = |service: &Service| {
                let (service, is_over) = (service.clone(), &is_over);
                let named = Builder::new().name(format!("oracle {}", service.name()));
                named.spawn_scoped(scope, move || service.run(self.site, is_over))
            };
            let services: Result<Vec<_>, _> = self.services.iter().map(serve).collect();
            let seats: Vec<_> = (0..self.workers).map(|_| meeting.seat()).collect();
            let worker = &worker;
            let start = |(number, seat): (usize, _)| {
                let named = Builder::new().name(format!("client {number}"));
                named.spawn_scoped(scope, move || worker(number, &seat))
            };
            let workers: Result<Vec<_>, _> = seats.into_iter().enumerate().map(start).collect();
            let done = workers
                .context("cannot start all threads: start fewer")
                .and_then(|workers| joined(workers.into_iter().map(|thread| thread.join())));
            let checked = done.and_then(|done| check(&done).map(|()| done));
            is_over.store(true, Ordering::Relaxed); // the flag carries no data
            let services = services.context("cannot start the oracle's threads")?;
            // Before what the workers say: they complain of a service that has failed.
            let traffic = joined(services.into_iter().map(|thread| thread.join()))?;
            let service_traffic = traffic.into_iter().fold(Traffic::default(), |sum, more| sum + more);
            Ok(Done { workers: checked?, service_traffic })
        })
    }
}

/// What threads came to, or the first trouble, once all have ended.
fn joined<T>(threads: impl Iterator<Item = std::thread::Result<Result<T>>>) -> Result<Vec<T>> {
    let all: Vec<_> = threads.collect();
    let panicked = || anyhow!("a thread of the measurement panicked, see above");
    all.into_iter().map(|outcome| outcome.unwrap_or_else(|_| Err(panicked()))).collect()
}
