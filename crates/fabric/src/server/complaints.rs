//! Log messages about connections that are refused or closed: one line a period for each kind, with the
//! number of lines left out, so that a flood is noticed but does not fill the log. At level debug each
//! connection has a line.

use std::io;
use std::time::Instant;

use farpool_throttle::Throttles;

use super::origin::Origin;

/// Why a connection was refused or closed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Complaint {
    /// All places are taken, and it had presented no key.
    Crowded,
    /// All places for connections with a key are taken, and its owner has its share.
    Shared,
    /// It sent something malformed.
    Malformed,
    /// It sent too many requests without a key.
    Useless,
}

impl Complaint {
    fn text(self) -> &'static str {
        match self {
            Complaint::Crowded => "all connections are in use; the oldest without a key was closed",
            Complaint::Shared => {
                "all connections are in use; an owner that has its share was refused another, or gave one up"
            }
            Complaint::Malformed => "malformed input; the connection was closed",
            Complaint::Useless => "a connection that sent too many requests without a key was closed",
        }
    }
}

#[derive(PartialEq, Eq, Hash, Debug)]
enum Kind {
    Of(Complaint),
    NotAccepted,
    NoMemory,
}

/// Complaints of one server.
#[derive(Default, Debug)]
pub struct Complaints(Throttles<Kind>);

impl Complaints {
    /// Reports a connection from `origin`.
    pub fn about(&self, complaint: Complaint, origin: Origin, now: Instant) {
        match self.0.occurs(Kind::Of(complaint), now) {
            Some(left_out) => tracing::warn!(%origin, left_out, "{}", complaint.text()),
            None => tracing::debug!(%origin, "{}", complaint.text()),
        }
    }

    /// A connection could not be accepted.
    pub(super) fn not_accepted(&self, error: &io::Error, now: Instant) {
        if let Some(left_out) = self.0.occurs(Kind::NotAccepted, now) {
            tracing::warn!(
                %error, left_out,
                "a connection could not be accepted; raise the limit on open files"
            );
        }
    }

    /// There is no memory or no descriptor for a connection's ring.
    pub(super) fn no_memory(&self, error: &io::Error, now: Instant) {
        if let Some(left_out) = self.0.occurs(Kind::NoMemory, now) {
            tracing::warn!(%error, left_out, "no memory for another client's calls; closing its connection");
        }
    }

    /// Reports what was left out of a flood that has ended. Called regularly.
    pub fn tell_overdue(&self, now: Instant) {
        let left_out = self.0.overdue(now);
        if left_out > 0 {
            tracing::warn!(left_out, "more connections were refused or closed for the same reasons");
        }
    }
}
