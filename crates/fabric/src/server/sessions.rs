//! Which incarnation of each session is in force.

use std::collections::{HashMap, VecDeque};

use farpool_wire::{Hello, Incarnation, SessionId};

/// Sessions without a connection that are remembered, so that a late greeting of an old incarnation is
/// recognised as old. A greeting that is delayed while this many connections end may be taken for the first
/// of a new session.
const REMEMBERED: usize = 16 << 10;

/// The table of sessions of one server, for any transport. The server numbers the connections.
pub struct Sessions {
    sessions: HashMap<SessionId, Session>,
    /// The session of each connection, so that a flood of short connections costs no search each.
    by_connection: HashMap<u64, SessionId>,
    /// Sessions in the order in which their connections ended; entries may be outdated.
    ended: VecDeque<SessionId>,
}

struct Session {
    incarnation: Incarnation,
    connection: Option<u64>,
}

impl Default for Sessions {
    fn default() -> Self {
        Sessions::new()
    }
}

impl Sessions {
    /// An empty table.
    pub fn new() -> Self {
        Sessions { sessions: HashMap::new(), by_connection: HashMap::new(), ended: VecDeque::new() }
    }

    /// Enters a greeting. Returns the incarnation now in force, and the superseded connection, if there is
    /// one, to close first.
    pub fn greet(&mut self, hello: Hello, connection: u64) -> (Incarnation, Option<u64>) {
        let fresh = Session { incarnation: hello.incarnation, connection: Some(connection) };
        match self.sessions.get_mut(&hello.session) {
            Some(known) if known.incarnation >= hello.incarnation => (known.incarnation_in_force(), None),
            Some(known) => {
                let older = std::mem::replace(known, fresh).connection;
                older.map(|older| self.by_connection.remove(&older));
                self.by_connection.insert(connection, hello.session);
                (hello.incarnation, older)
            }
            None => {
                self.sessions.insert(hello.session, fresh);
                self.by_connection.insert(connection, hello.session);
                (hello.incarnation, None)
            }
        }
    }

    /// Notes that a connection has ended.
    pub fn closed(&mut self, connection: u64) {
        let Some(id) = self.by_connection.remove(&connection) else { return };
        let Some(session) = self.sessions.get_mut(&id) else { return };
        session.connection = None;
        self.ended.push_back(id);
        while self.ended.len() > REMEMBERED {
            let oldest = self.ended.pop_front().expect("longer than the limit");
            if self.sessions.get(&oldest).is_some_and(|session| session.connection.is_none()) {
                self.sessions.remove(&oldest);
            }
        }
    }
}

impl Session {
    /// The answer to a client that greets with an incarnation already used: one that the client does not
    /// expect, so that it closes the connection.
    fn incarnation_in_force(&self) -> Incarnation {
        Incarnation(self.incarnation.0 + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farpool_wire::NodeId;

    fn hello(session: u64, incarnation: u64) -> Hello {
        Hello { session: SessionId(session), incarnation: Incarnation(incarnation), node: NodeId(1) }
    }

    #[test]
    fn a_newer_incarnation_supersedes_the_older_connection() {
        let mut sessions = Sessions::new();
        assert_eq!(sessions.greet(hello(1, 1), 10), (Incarnation(1), None));
        assert_eq!(sessions.greet(hello(1, 2), 11), (Incarnation(2), Some(10)));
    }

    #[test]
    fn an_old_incarnation_that_arrives_late_is_not_let_in() {
        let mut sessions = Sessions::new();
        sessions.greet(hello(1, 2), 11);
        sessions.closed(11);
        let (in_force, superseded) = sessions.greet(hello(1, 1), 12);
        assert_ne!(in_force, Incarnation(1));
        assert_eq!(superseded, None);
        assert_ne!(sessions.greet(hello(1, 2), 13).0, Incarnation(2));
    }

    #[test]
    fn the_table_of_ended_sessions_is_bounded() {
        let mut sessions = Sessions::new();
        for id in 0..3 * REMEMBERED as u64 {
            sessions.greet(hello(id, 1), id);
            sessions.closed(id);
        }
        assert!(sessions.sessions.len() <= REMEMBERED && sessions.by_connection.is_empty());
    }
}
