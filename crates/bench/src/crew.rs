//! The threads of a transaction measurement: services that run throughout, and workers that are measured.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Builder;

use anyhow::{Context, Result};
use farpool_txn::Traffic;

use crate::meeting::{Meeting, Seat, joined};
use crate::service::Service;
use crate::site::Site;

/// The threads of a measurement, and what they share.
pub struct Crew<'a> {
    /// The far memory.
    pub site: &'a Site,
    /// Ends everything early once set.
    pub stop: &'a AtomicBool,
    /// They run until all workers have ended and their work has been checked.
    pub services: Vec<Service>,
    /// The number of threads that are measured.
    pub workers: usize,
}

/// The results of a measurement.
pub struct Done<T> {
    /// The result of each worker.
    pub workers: Vec<T>,
    /// The far-memory traffic of all services together.
    pub service_traffic: Traffic,
}

impl Crew<'_> {
    /// Runs services and workers, and calls `check` on the workers' results before the services end.
    pub fn run<T: Send>(
        &self,
        worker: impl Fn(usize, &Seat<'_>) -> Result<T> + Sync,
        check: impl FnOnce(&[T]) -> Result<()>,
    ) -> Result<Done<T>> {
        let is_finished = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let serve = |service: &Service| {
                let (service, is_finished) = (service.clone(), &is_finished);
                let named = Builder::new().name(format!("oracle {}", service.name()));
                named.spawn_scoped(scope, move || service.run(self.site, is_finished))
            };
            let services: Result<Vec<_>, _> = self.services.iter().map(serve).collect();
            let done = Meeting::new(self.stop).hold(self.workers, worker);
            let checked = done.and_then(|done| check(&done).map(|()| done));
            is_finished.store(true, Ordering::Relaxed); // the flag carries no data
            let services = services.context("cannot start the oracle's threads")?;
            // Services are checked before workers: if a service failed, the workers' errors are only a
            // consequence.
            let traffic = joined(services.into_iter().map(|thread| thread.join()))?;
            let service_traffic = traffic.into_iter().fold(Traffic::default(), |sum, more| sum + more);
            Ok(Done { workers: checked?, service_traffic })
        })
    }
}
