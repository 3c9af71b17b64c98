//! A thread's access to the footprint: an endpoint, a queue per node, and every region attached.

use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use farpool_fabric::{ArenaBuf, Endpoint, EndpointConfig, Negotiated, Queue, Transports, block_on};
use farpool_wire::{Epoch, RegionId, RemoteAddr};

use crate::footprint::Footprint;
use crate::places::{FootprintBlock, fill_initial};

/// Time from posting until an operation's outcome is *unknown*: a measurement that waits longer has failed.
const DEADLINE: Duration = Duration::from_secs(10);
/// Size of the writes that fill the footprint.
const FILL_BYTES: usize = 256 << 10;

/// Opens a thread's endpoint of the fabric.
///
/// # Errors
/// If there is no memory for its transfers.
pub fn open_endpoint(transports: Transports, arena_bytes: usize) -> std::io::Result<Endpoint> {
    let transport = Rc::new(Negotiated::new(transports, DEADLINE));
    Endpoint::try_new(EndpointConfig::real(transport, arena_bytes, DEADLINE))
}

/// A thread's access to the footprint.
pub struct Reach {
    /// The thread's endpoint.
    pub endpoint: Endpoint,
    queues: Vec<Queue>,
    regions: Vec<Spot>,
    region_bytes: u64,
}

#[derive(Clone, Copy)]
struct Spot {
    queue: usize,
    id: RegionId,
    epoch: Epoch,
}

impl Reach {
    /// Connects to the nodes of a footprint, with room for `arena_bytes` of transfers.
    pub fn open(footprint: &Footprint, transports: Transports, arena_bytes: usize) -> Result<Self> {
        let endpoint = open_endpoint(transports, arena_bytes.max(FILL_BYTES)).context(
            "there is no memory for a thread's transfers: lower --threads, --depth, --batch or --block",
        )?;
        let (mut queues, mut regions): (Vec<Queue>, Vec<Spot>) = Default::default();
        for region in &footprint.regions {
            let known = queues.iter().position(|queue| queue.node() == region.id.node);
            let queue = known.unwrap_or(queues.len());
            if known.is_none() {
                let opened = endpoint.open(region.node.peer.clone());
                queues.push(opened.with_context(|| format!("cannot reach node {}", region.id.node))?);
            }
            block_on(&endpoint, region.attach(&queues[queue]))
                .with_context(|| format!("cannot open region {}", region.id))?;
            regions.push(Spot { queue, id: region.id, epoch: region.epoch });
        }
        let reach = Reach { endpoint, queues, regions, region_bytes: footprint.region_bytes };
        let by = reach.queues.first().and_then(Queue::transport);
        let wanted = crate::options::IoTransport(transports.choice).to_string();
        ensure!(by == Some(wanted.as_str()), "asked for {wanted}, got {}", by.unwrap_or("nothing"));
        Ok(reach)
    }

    /// The queue to a place's node, and the place's address in the fabric.
    #[inline]
    pub fn find(&self, place: FootprintBlock) -> (&Queue, RemoteAddr, Epoch) {
        let spot = &self.regions[place.region];
        let at = RemoteAddr { region: spot.id, offset: place.offset };
        (&self.queues[spot.queue], at, spot.epoch)
    }

    /// Moves a place to the region of `like` if they are on different nodes, since a batch goes to one node.
    #[inline]
    pub fn beside(&self, like: FootprintBlock, mut place: FootprintBlock) -> FootprintBlock {
        if self.queues.len() > 1 && self.regions[place.region].queue != self.regions[like.region].queue {
            place.region = like.region;
        }
        place
    }

    /// Takes a buffer from the arena.
    pub fn buffer(&self, bytes: usize) -> Result<ArenaBuf> {
        self.endpoint.arena().take(bytes).context("the arena is too small")
    }

    /// Fills every `threads`-th region, starting with number `thread`, with the initial words that readers
    /// expect.
    pub fn fill(&self, thread: usize, threads: usize) -> Result<()> {
        self.walk(thread, threads, async |queue, at, epoch, place, mut buffer| {
            fill_initial(&mut buffer, place);
            queue.write(at, epoch, buffer).await
        })
    }

    /// The wrapping sum of all words of the footprint.
    pub fn sum(&self) -> Result<u64> {
        let mut sum = 0u64;
        self.walk(0, 1, async |queue, at, epoch, _, buffer| {
            let (buffer, result) = queue.read(at, epoch, buffer).await;
            for word in buffer.as_chunks::<8>().0 {
                sum = sum.wrapping_add(u64::from_le_bytes(*word));
            }
            (buffer, result)
        })?;
        Ok(sum)
    }

    fn walk(
        &self,
        first: usize,
        step: usize,
        mut visit: impl AsyncFnMut(
            &Queue,
            RemoteAddr,
            Epoch,
            FootprintBlock,
            ArenaBuf,
        ) -> (ArenaBuf, Result<(), farpool_fabric::OpError>),
    ) -> Result<()> {
        let piece = FILL_BYTES as u64;
        let mut buffer = self.buffer(FILL_BYTES)?;
        for region in (first..self.regions.len()).step_by(step) {
            for offset in (0..self.region_bytes).step_by(FILL_BYTES) {
                ensure!(
                    offset + piece <= self.region_bytes,
                    "the region size is not a multiple of {piece} bytes"
                );
                let place = FootprintBlock { region, offset };
                let (queue, at, epoch) = self.find(place);
                let (returned, result) = block_on(&self.endpoint, visit(queue, at, epoch, place, buffer));
                result.map_err(|error| anyhow!("cannot fill or read {at}: {error}"))?;
                buffer = returned;
            }
        }
        Ok(())
    }
}
