//! The simulated fabric: a seeded world of hosts, nodes and processes on a virtual clock.
//!
//! Production code runs on it unchanged: [`SimTransport`] implements the seam, [`Executor`] runs the futures
//! of real endpoints, and a node of the world serves a real [`Host`](crate::Host), so that keys, epochs,
//! fences and scrubbing are the code that ships. The wires, the processors and the clocks are simulated.
//!
//! W1. A seed determines the history bit for bit: nothing here reads a real clock, a hash order or an
//!     address.
//! W2. Time passes only when no task is ready and no completion waits to be collected.
//! W3. A transfer takes effect in parts of whole aligned words, spread over time in an order that the seed
//!     determines.
//! W4. The world uses the freedom that the contract leaves: reads and atomics are overtaken, packets are held
//!     back past their deadlines and arrive after a new incarnation, processes stop in the middle of a copy.
//! W5. What the contract promises is kept, unless a [`Mutation`] breaks it on purpose.
//!
//! Not here: what clients do and how histories are judged (crate `farpool-sim`).

mod clock;
mod copying;
mod events;
mod executor;
mod link;
mod mail;
mod network;
mod node;
mod order;
mod random;
mod settings;
mod state;
mod trace;
mod world;

pub use clock::SimClock;
pub use executor::{Executor, RunEnd, Tasks};
pub use link::{Path, SimTransport};
pub use mail::Letter;
pub use network::HostId;
pub use random::Random;
pub use settings::{Faults, Mutation, Network, Service, Span, WorldConfig};
pub use state::ProcessId;
pub use world::World;
