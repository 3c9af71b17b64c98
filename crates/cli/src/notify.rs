//! Tells systemd the state of a daemon (sd_notify(3)): one datagram to the socket that the environment names,
//! if it names one. A dozen lines do not justify a dependency.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// The variable that names the socket: a path, or a name in the abstract namespace after an `@`.
pub const VARIABLE: &str = "NOTIFY_SOCKET";

/// Tells that the daemon serves.
pub fn ready() {
    tell("READY=1");
}

/// Tells that the daemon was asked to end.
pub fn stopping() {
    tell("STOPPING=1");
}

/// A failure is only logged: the service manager has a deadline of its own.
fn tell(state: &str) {
    let Some(name) = std::env::var_os(VARIABLE) else { return };
    let address = match name.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        _ => SocketAddr::from_pathname(&name),
    };
    let sent = address.and_then(|address| UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address));
    if let Err(error) = sent {
        tracing::warn!(%error, state, "could not notify the service manager");
    }
}
