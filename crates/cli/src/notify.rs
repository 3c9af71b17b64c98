//! Tells systemd how a daemon stands (sd_notify(3)): one datagram to the socket that it names, if it does. A dozen lines, for which
//! a dependency would not pay.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Names the socket: a path, or a name in the abstract namespace after an `@`.
pub const VARIABLE: &str = "NOTIFY_SOCKET";

/// The daemon serves.
pub fn ready() {
    tell("READY=1");
}

/// The daemon was asked to end.
pub fn stopping() {
    tell("STOPPING=1");
}

/// Nobody waits for it where that fails: the service manager has a deadline of its own.
fn tell(state: &str) {
    let Some(name) = std::env::var_os(VARIABLE) else { return };
    let address = match name.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        _ => SocketAddr::from_pathname(&name),
    };
    let sent = address.and_then(|address| UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address));
    if let Err(error) = sent {
        tracing::warn!(%error, state, "the service manager was not told");
    }
}
