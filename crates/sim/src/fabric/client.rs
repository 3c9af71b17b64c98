//! Clients: real endpoints and queues. Each task has its own connections, does what the seed says, and
//! records its requests and their answers.

mod connection;
mod work;

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use farpool_fabric::sim::{Path, Random};
use farpool_fabric::{Endpoint, EndpointConfig, OpError};
use farpool_wire::SessionId;

use super::director::Offer;
use super::history::{Actor, End};
use super::{DEADLINE, ROUNDS, Run, new_process};
use crate::place::{ClientPlace, Routed};
use connection::Connection;

/// Staging memory of a client: a few pages for each of its tasks.
const ARENA_BYTES: usize = 24 * 4096;
/// Tasks of each client, each with its own queues.
const TASKS: u64 = 2;
/// How much later than its deadline an operation may end: operations that are carried out at once let time
/// pass while no task runs. (And each end of a measured wait reads two clocks, each of which rounds once.)
const LATE_NS: u64 = 20_000;

/// Starts a client's process. `again`: the client has crashed before.
pub(super) fn start(run: &Rc<Run>, place: ClientPlace, again: bool) {
    let process = new_process(run, place);
    let session = Rc::new(Cell::new(0));
    let given = session.clone();
    let namer = run.clone();
    let here = run.nodes.iter().find(|node| node.host == place.host).map(|node| node.id);
    let endpoint = Endpoint::new(EndpointConfig {
        transport: Routed::of(&run.world, process, here.filter(|_| place.path == Path::Shared)),
        clock: Rc::new(run.world.clock(place.host)),
        session_ids: Box::new(move || {
            given.set(namer.next_name());
            SessionId(given.get())
        }),
        arena_bytes: ARENA_BYTES,
        deadline: DEADLINE,
    });
    run.tasks.adopt(process, endpoint.clone());
    for number in 0..TASKS {
        let client = Client {
            run: run.clone(),
            place,
            process,
            endpoint: endpoint.clone(),
            session: session.clone(),
            random: run.random(run.next_name()),
            connections: run.nodes.iter().map(|_| None).collect(),
            // In-flight writes of a dead predecessor may still arrive: order is promised only within one
            // queue. So a restarted client does not write to the stream.
            owns_stream: number == 0 && !again,
            last: None,
            read_back: None,
        };
        let staying = run.left.stay();
        run.tasks.spawn(process, async move {
            client.live().await;
            drop(staying);
        });
    }
    run.clients.borrow_mut()[place.index] = process;
}

/// One task of a client.
struct Client {
    run: Rc<Run>,
    place: ClientPlace,
    process: farpool_fabric::sim::ProcessId,
    endpoint: Endpoint,
    /// The id of the session that the endpoint opened last.
    session: Rc<Cell<u64>>,
    random: Random,
    connections: Vec<Option<Connection>>,
    owns_stream: bool,
    /// The offer that was used last; it may have been fenced since.
    last: Option<Offer>,
    /// Set after an unknown outcome. Once the node has answered a new incarnation, a read shows what
    /// happened.
    read_back: Option<Offer>,
}

impl Client {
    async fn live(mut self) {
        for _ in 0..ROUNDS {
            let Some(offer) = self.choose() else {
                let a_while = Duration::from_nanos(5_000 + self.random.below(20_000));
                self.endpoint.sleep(a_while).await;
                continue;
            };
            if !self.connect(offer.node).await || !self.attach(&offer).await {
                let a_while = Duration::from_nanos(2_000 + self.random.below(60_000));
                self.endpoint.sleep(a_while).await;
                continue;
            }
            self.last = Some(offer);
            if self.read_back.take().is_some() {
                // Reads twice, to notice anything that an older incarnation might still do in between.
                self.read_all(&offer).await;
                let a_while = Duration::from_nanos(20_000 + self.random.below(150_000));
                self.endpoint.sleep(a_while).await;
                self.read_all(&offer).await;
            } else {
                self.work(&offer).await;
            }
        }
    }

    fn choose(&mut self) -> Option<Offer> {
        if let Some(offer) = self.read_back.or(self.last.filter(|_| self.random.chance(400))) {
            return Some(offer);
        }
        let board = self.run.board.borrow();
        let offers = &board.offers[self.place.index];
        (!offers.is_empty()).then(|| offers[self.random.index(offers.len())])
    }

    fn actor(&self, offer: &Offer) -> Actor {
        let connection = self.connections[offer.node].as_ref().expect("connected before");
        let (session, incarnation) = (connection.session, connection.incarnation);
        Actor { lease: offer.lease, grant: offer.grant, session, incarnation }
    }

    /// Waits for an operation, and checks that it ends in time.
    async fn timed<T>(&self, operation: impl Future<Output = T>) -> T {
        let (started_ns, true_ns) = (self.endpoint.now_ns(), self.run.world.now_ns());
        let output = operation.await;
        let waited_ns = self.endpoint.now_ns() - started_ns;
        let was_paused = self.run.world.paused_until_ns(self.process) > true_ns;
        if waited_ns > DEADLINE.as_nanos() as u64 + LATE_NS && !was_paused {
            self.run.complain(format!("an operation took {waited_ns} ns"));
        }
        output
    }

    /// Updates the client's state for how an operation ended.
    fn note_end<T>(&mut self, offer: &Offer, result: &Result<T, OpError>) -> End {
        let connection = self.connections[offer.node].as_mut().expect("connected before");
        match result {
            Ok(_) => End::Done,
            Err(OpError::NotSent { .. }) => {
                connection.lost = true;
                End::Refused
            }
            Err(OpError::Unknown { .. }) => {
                connection.lost = true;
                self.read_back = Some(*offer);
                End::Unknown
            }
            Err(OpError::Refused(refusal)) => {
                self.note_refusal(offer, *refusal);
                End::Refused
            }
        }
    }
}
