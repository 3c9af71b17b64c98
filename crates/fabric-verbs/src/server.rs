//! The node's side: one thread that answers connection requests and messages. READs, WRITEs and atomics pass
//! it by.
//!
//! N1. A connection's queue pair is destroyed before anything that it could reach is used otherwise: a fence
//!     cuts it ([`farpool_fabric::CutOff`]), a newer incarnation of its session does, its end does.
//! N2. A client reaches a region only by a memory window bound to its queue pair, or, where the device has
//!     none, by a registration in a protection domain that holds its queue pair alone.
//! N3. Malformed messages close their connection, count as rejected, and change nothing else.
//! N4. Memory is bounded: connections, messages in flight on each and regions attached on each have limits.

mod access;
mod connection;
mod lending;
mod run;

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use farpool_fabric::Host;
use rustix::event::EventfdFlags;

/// How to serve.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ServeOptions {
    /// Use memory windows where the device has them.
    pub windows: bool,
    /// Let cards do atomics where the device can. Right only while nobody reaches the same words by a path on
    /// which the processor does them (other transports): the two kinds are not atomic with respect to each
    /// other.
    pub card_atomics: bool,
}

impl Default for ServeOptions {
    fn default() -> Self {
        ServeOptions { windows: true, card_atomics: true }
    }
}

/// A running server; stops when dropped.
pub struct VerbsServer {
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
    address: SocketAddr,
}

struct Stop {
    asked: AtomicBool,
    wake: OwnedFd,
}

impl VerbsServer {
    /// Where it listens, the port included.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for VerbsServer {
    fn drop(&mut self) {
        self.stop.asked.store(true, Ordering::Release); // pairs with the load in `Server::run`
        // Failing to write means the counter is full: the thread is being woken anyway.
        let _ = rustix::io::write(&self.stop.wake, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the RDMA server's thread panicked");
        }
    }
}

/// Serves `host` on the device that has the address `listen`, on a thread of its own, until the result is
/// dropped. Port zero takes a free one.
///
/// # Errors
/// Without rdma-core or a device at that address; [`crate::VerbsError`] says what to do.
pub fn serve_verbs(
    host: Arc<dyn Host>,
    listen: SocketAddr,
    options: ServeOptions,
) -> io::Result<VerbsServer> {
    let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let stop = Arc::new(Stop { asked: AtomicBool::new(false), wake });
    let (server, address) = run::Server::new(host, listen, options, stop.clone())?;
    let thread = std::thread::Builder::new().name("verbs-server".into()).spawn(move || server.run())?;
    Ok(VerbsServer { stop, thread: Some(thread), address })
}
