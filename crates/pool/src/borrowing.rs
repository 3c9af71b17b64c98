//! Borrowing: sessions of a process share connections. A session does transfers for a sibling that has no
//! place at the node.
//!
//! B1. A borrower waits for a locked session only for a bounded time. It holds its own lock meanwhile, so two
//!     borrowers could otherwise wait for each other for ever.
//! B2. A lender does not borrow in turn.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use farpool_fabric::block_on;

use crate::pool::Shared;
use crate::session::{Confined, Direction, Failure, Way};
use crate::space::Extent;
use crate::timed_mutex::TimedMutex;

/// How long a borrower waits for one busy sibling: as long as a few operations take on a busy machine. A
/// busy sibling lets a waiting thread in between two of them (T1 of `timed_mutex.rs`).
const WAIT_FOR_ONE: Duration = Duration::from_millis(50);

/// The outcome of asking siblings.
pub(crate) enum Borrowed {
    /// A sibling has done the transfer, or has tried to.
    Done(Result<(), Failure>),
    /// All siblings that may be connected are busy.
    AllBusy,
    /// No sibling is connected to the node.
    NoneConnected,
}

/// The other sessions of the process.
pub(crate) trait Siblings: Send + Sync {
    /// Does a transfer through the connection of one session.
    fn transfer(&self, direction: Direction, extent: &Extent, offset: u64, bytes: &mut [u8]) -> Borrowed;
}

/// All sessions of a pool but one.
pub(crate) struct OtherSessions {
    pub(crate) shared: Weak<Shared>,
    /// The borrower's own session, which the borrower has locked.
    pub(crate) own: Weak<TimedMutex<Confined>>,
}

impl Siblings for OtherSessions {
    fn transfer(&self, direction: Direction, extent: &Extent, offset: u64, bytes: &mut [u8]) -> Borrowed {
        let Some(shared) = self.shared.upgrade() else { return Borrowed::NoneConnected };
        let mut sessions = shared.sessions();
        sessions.retain(|session| !std::ptr::eq(Arc::as_ptr(session), self.own.as_ptr()));
        let first = shared.next_lender.fetch_add(1, Ordering::Relaxed); // spreads load; pairs with nothing
        let (before, after) = sessions.split_at(first % sessions.len().max(1));
        let mut carry = |session: &Confined| {
            let connected = session.0.is_connected(&extent.region().node);
            connected.then(|| session.carry(direction, extent, offset, bytes)).flatten()
        };
        let mut busy = Vec::new();
        for session in after.iter().chain(before) {
            match session.try_lock() {
                Some(session) => {
                    if let Some(ended) = carry(&session) {
                        return Borrowed::Done(ended);
                    }
                }
                None => busy.push(session),
            }
        }
        let Some(next) = busy.get(first % busy.len().max(1)) else { return Borrowed::NoneConnected };
        match next.lock_within(WAIT_FOR_ONE).and_then(|session| carry(&session)) {
            Some(ended) => Borrowed::Done(ended),
            None => Borrowed::AllBusy,
        }
    }
}

impl Confined {
    /// Does a transfer for a sibling. `None`: the arena of this session has no room for its bytes.
    fn carry(
        &self,
        direction: Direction,
        extent: &Extent,
        offset: u64,
        bytes: &mut [u8],
    ) -> Option<Result<(), Failure>> {
        let core = &self.0;
        let mut buffer = core.buffer(bytes.len()).ok()?;
        if direction == Direction::Write {
            buffer.copy_from_slice(bytes);
        }
        let carried = core.transfer(direction, extent, offset, buffer, Way::Own);
        let (buffer, result) = block_on(core.endpoint(), carried);
        if direction == Direction::Read {
            bytes.copy_from_slice(&buffer);
        }
        Some(result)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use farpool_fabric::{Peer, TransportChoice};
    use farpool_wire::{NodeId, OwnerId, Refusal};

    use super::*;
    use crate::pool::PoolConfig;
    use crate::session::scripted::{Answer, Asked, Kind, Leases, World, extent, node};
    use crate::space::EXTENT_BYTES;
    use crate::stock::{Stock, StockConfig};

    const NODE: NodeId = NodeId(1);

    /// The sessions of a process, and an extent on a node.
    struct Process {
        world: World,
        shared: Arc<Shared>,
        extent: Extent,
    }

    impl Process {
        fn new() -> Self {
            let world = World::new();
            let reach = |_: &_| Peer { node: NODE, tcp: None, verbs: None, shm_socket: None };
            let stock = Stock::new(StockConfig {
                owner: OwnerId(7),
                region_bytes: 4 * EXTENT_BYTES,
                limit_regions: None,
                clock: Arc::new(world.clone()),
                reach: Box::new(reach),
                journal: None,
            });
            let transport = TransportChoice::Auto.into();
            let config = PoolConfig { broker: String::new(), tls: None, transport, limit_bytes: None };
            let (sessions, next_lender) = (rustix_futex_sync::Mutex::default(), AtomicUsize::new(0));
            let shared = Arc::new(Shared { config, stock: Arc::new(stock), sessions, next_lender });
            Process { world, shared, extent: extent(&node(NODE.0), 0, 1) }
        }

        fn session(&self) -> Arc<TimedMutex<Confined>> {
            let session = Arc::new_cyclic(|own| {
                let core = self.world.core(Leases::new(&self.world));
                TimedMutex::new(Confined(core.among(Arc::new(self.others(own)))))
            });
            self.shared.register_session(Arc::downgrade(&session));
            session
        }

        fn others(&self, own: &Weak<TimedMutex<Confined>>) -> OtherSessions {
            OtherSessions { shared: Arc::downgrade(&self.shared), own: own.clone() }
        }

        /// A session with a connection, the first of all, and what a session without one borrows from.
        fn lender(&self) -> (Arc<TimedMutex<Confined>>, OtherSessions) {
            let lender = self.session();
            self.world.read(&lender.lock().0, &self.extent, 1).unwrap();
            (lender, self.others(&Weak::new()))
        }

        fn borrow(&self, others: &OtherSessions, direction: Direction, bytes: &mut [u8]) -> Borrowed {
            others.transfer(direction, &self.extent, 0, bytes)
        }
    }

    /// The node has a place for the first connection only.
    fn one_place(asked: &Asked) -> Answer {
        match asked.kind {
            Kind::Attach if asked.connection > 1 => Answer::Refuse(Refusal::Exhausted),
            _ => Answer::Serve,
        }
    }

    #[test]
    fn a_session_without_a_place_reads_and_writes_by_the_connection_of_a_sibling() {
        let process = Process::new();
        process.world.answers(one_place);
        let _lender = process.lender();
        let _unconnected = process.session();
        let region = process.extent.region().id;
        let borrower = process.session();
        let borrower = borrower.lock();
        for round in 1..=4 {
            process.world.write(&borrower.0, &process.extent, &[round; 5]).unwrap();
            assert_eq!(process.world.stored(region, 5), [round; 5]);
            process.world.store(region, &[100 + round; 5]);
            let read = process.world.read(&borrower.0, &process.extent, 5);
            assert_eq!(read.unwrap(), [100 + round; 5]);
        }
        assert_eq!(process.world.connections(NODE), 1);
    }

    #[test]
    fn a_sibling_that_is_busy_is_not_taken_for_one_without_a_connection() {
        let process = Process::new();
        let (lender, others) = process.lender();
        {
            let _busy = lender.lock();
            for _ in 0..3 {
                assert!(matches!(process.borrow(&others, Direction::Read, &mut [0]), Borrowed::AllBusy));
            }
        }
        assert!(matches!(process.borrow(&others, Direction::Read, &mut [0]), Borrowed::Done(Ok(()))));
    }

    #[test]
    fn a_session_makes_no_connection_for_a_sibling() {
        let process = Process::new();
        let none_from = |others: &OtherSessions| {
            let connected = process.world.asked(NODE, Kind::Connect);
            let attached = process.world.asked(NODE, Kind::Attach);
            let borrowed = process.borrow(others, Direction::Read, &mut [0]);
            assert!(matches!(borrowed, Borrowed::NoneConnected));
            assert_eq!(process.world.asked(NODE, Kind::Connect), connected);
            assert_eq!(process.world.asked(NODE, Kind::Attach), attached);
        };
        // It has used no node yet.
        let unconnected = process.session();
        none_from(&process.others(&Weak::new()));
        drop(unconnected);
        // It has lost its connection.
        let (lender, others) = process.lender();
        process.world.answers(|asked| if asked.kind == Kind::Read { Answer::Lose } else { Answer::Serve });
        assert!(process.world.read(&lender.lock().0, &process.extent, 1).is_err());
        assert_eq!(process.world.connections(NODE), 0);
        process.world.answers(|_| Answer::Serve);
        none_from(&others);
        drop(lender);
        // Its connection has no region any more.
        let lender = process.session();
        let ended = extent(&process.extent.region().node, 1, 1);
        process.world.read(&lender.lock().0, &ended, 1).unwrap();
        ended.region().retire();
        lender.lock().let_go();
        assert_eq!(process.world.connections(NODE), 1);
        none_from(&others);
    }

    #[test]
    fn a_lender_that_loses_its_place_meanwhile_does_not_borrow_in_turn() {
        for (direction, in_doubt) in [(Direction::Write, true), (Direction::Read, false)] {
            let process = Process::new();
            let (_lender, others) = process.lender();
            let _other = process.session();
            process.world.answers(|asked| match asked.kind {
                Kind::Read | Kind::Write => Answer::Lose,
                _ => one_place(asked),
            });
            let borrowed = process.borrow(&others, direction, &mut [1]);
            let Borrowed::Done(Err(Failure::NoPlace { in_doubt: told })) = borrowed else {
                panic!("the lender has no place")
            };
            assert_eq!(told, in_doubt);
        }
    }
}
