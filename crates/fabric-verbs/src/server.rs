//! The node's side: one thread that answers connection requests and messages. The card carries out READs,
//! WRITEs and, where it can, atomics without this thread.
//!
//! N1. A connection's queue pair is destroyed before the memory that it could reach is used for anything
//!     else. This happens when a fence cuts the connection ([`farpool_fabric::CutOff`]), when a newer
//!     incarnation of its session supersedes it, and when it ends.
//! N2. A client reaches a region only by a memory window bound to its queue pair or, if the device has no
//!     windows, by a registration in a protection domain that contains only its queue pair.
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
    /// Let cards do atomics if the device can. This is correct only while no client reaches the same words by
    /// a path on which the processor does the atomics (other transports): the two kinds are not atomic with
    /// respect to each other.
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
    /// The address on which it listens, with the real port.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for VerbsServer {
    fn drop(&mut self) {
        self.stop.asked.store(true, Ordering::Release); // pairs with the load in `Server::run`
        // The write fails only if the counter is full; then the thread is being woken already.
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
