//! Wires: latency, bandwidth, queues at each NIC, packets held back, hosts cut off from each other.
//!
//! In each direction, a connection's packets arrive in the order sent, whatever happens to them on the way.

use std::collections::{BTreeMap, BTreeSet};

use crate::sim::Random;
use crate::sim::clock::TRUE_RATE_PPM;
use crate::sim::events::{Event, Events};
use crate::sim::order::HEADER_BYTES;
use crate::sim::settings::{Faults, Network};

/// A machine: a NIC and a clock.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct HostId(pub(super) usize);

pub(super) struct HostState {
    /// How fast its clock runs.
    pub(super) rate_ppm: u64,
    sends_from_ns: u64,
    receives_from_ns: u64,
}

/// A packet to be carried.
pub(super) struct Packet {
    pub(super) from: HostId,
    pub(super) to: HostId,
    /// Payload only.
    pub(super) bytes: usize,
    /// Arrival of the previous packet on the same connection: this one arrives no earlier.
    pub(super) after_ns: u64,
    pub(super) event: Event,
}

/// All hosts and what lies between them.
pub(super) struct Wires {
    pub(super) hosts: Vec<HostState>,
    cuts: BTreeSet<(HostId, HostId)>,
    /// Packets that wait for a cut to heal, in the order sent.
    held: Vec<Packet>,
    /// What was held back goes first, then what was sent after it.
    not_before: BTreeMap<(HostId, HostId), u64>,
}

fn pair(one: HostId, other: HostId) -> (HostId, HostId) {
    (one.min(other), one.max(other))
}

impl Wires {
    pub(super) fn new() -> Self {
        Wires { hosts: Vec::new(), cuts: BTreeSet::new(), held: Vec::new(), not_before: BTreeMap::new() }
    }

    pub(super) fn add_host(&mut self, rate_ppm: u64) -> HostId {
        debug_assert!(rate_ppm.abs_diff(TRUE_RATE_PPM) <= TRUE_RATE_PPM / 10, "clocks are up to 10 % off");
        self.hosts.push(HostState { rate_ppm, sends_from_ns: 0, receives_from_ns: 0 });
        HostId(self.hosts.len() - 1)
    }

    pub(super) fn are_cut(&self, one: HostId, other: HostId) -> bool {
        self.cuts.contains(&pair(one, other))
    }

    pub(super) fn cut(&mut self, one: HostId, other: HostId) {
        self.cuts.insert(pair(one, other));
    }

    /// Connects the pair again; returns what was held back, to be sent anew.
    pub(super) fn heal(&mut self, one: HostId, other: HostId) -> Vec<Packet> {
        self.cuts.remove(&pair(one, other));
        let healed = |packet: &mut Packet| pair(packet.from, packet.to) == pair(one, other);
        self.held.extract_if(.., healed).collect()
    }

    /// Sends a packet; returns when it arrives, unless it waits for a cut to heal.
    pub(super) fn send(
        &mut self,
        now_ns: u64,
        packet: Packet,
        (network, faults): (&Network, &Faults),
        random: &mut Random,
        events: &mut Events,
    ) -> Option<u64> {
        let Packet { from, to, bytes, after_ns, .. } = packet;
        if from == to {
            let at_ns = (now_ns + network.local.draw(random)).max(after_ns);
            events.at(at_ns, packet.event);
            return Some(at_ns);
        }
        if self.are_cut(from, to) {
            self.held.push(packet);
            return None;
        }
        let wire_ns = ((bytes + HEADER_BYTES) as u64 * 1_000).div_ceil(network.bytes_per_us);
        let sender = &mut self.hosts[from.0];
        sender.sends_from_ns = sender.sends_from_ns.max(now_ns) + wire_ns;
        let flown_ns = sender.sends_from_ns + network.latency.draw(random);
        let receiver = &mut self.hosts[to.0];
        receiver.receives_from_ns = flown_ns.max(receiver.receives_from_ns + wire_ns);
        let mut at_ns = receiver.receives_from_ns;
        // Held back outside the NICs, so that only this connection waits for it.
        if let Some(late) = faults.late
            && random.chance(faults.late_permille)
        {
            at_ns += late.draw(random);
        }
        // Control messages have connections of their own, which do not wait for those that were cut.
        let is_mail = matches!(packet.event, Event::Mail { .. });
        let floor_ns = self.not_before.get(&(from, to)).filter(|_| !is_mail).copied().unwrap_or(0);
        at_ns = at_ns.max(after_ns).max(floor_ns);
        events.at(at_ns, packet.event);
        Some(at_ns)
    }

    /// Nothing from `from` to `to` arrives before what has just been sent again.
    pub(super) fn hold_back(&mut self, from: HostId, to: HostId, until_ns: u64) {
        let floor = self.not_before.entry((from, to)).or_default();
        *floor = (*floor).max(until_ns);
    }
}
