//! `farpool node shrink` and `farpool node grow`: how much memory a running node lends.

use std::time::Duration;

use anyhow::{Result, bail};
use farpool_control::Located;
use farpool_lease::LeaseClass;
use farpool_wire::NodeId;
use farpool_wire::control::{NodeStatus, RegionState, ResizeRequest};
use serde::Serialize;
use tokio::time::{Instant, sleep};

use crate::errors::UsageError;
use crate::leases::Grace;
use crate::nodes::{self, Node};
use crate::output::{complain, tell, tell_json};
use crate::reach::{BrokerAt, runtime, status_of};
use crate::size::ByteSize;

/// How often the node is asked how far it has come.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// How often the broker is asked what it has heard.
const LOOK_AT_BROKER_EVERY: Duration = Duration::from_millis(200);
/// How long it takes until the broker has heard of a change: a node's heartbeats are a second apart.
const HEARTBEAT_PATIENCE: Duration = Duration::from_secs(2);
/// How long a node may come no nearer to its new size while no lease is ending: longer than its pause after
/// it failed to get memory.
const REGION_DEADLINE: Duration = Duration::from_secs(8);

#[derive(Debug, clap::Subcommand)]
pub enum Resize {
    /// Give memory back to a node's machine
    ///
    /// Memory that is not lent goes back at once. If that is not enough, the node takes back leases that may
    /// be taken back (temporary files, caches), the newest first: their owners move what lies there to other
    /// nodes, as far as there is room. Leases of databases stay. The command waits until the memory is back,
    /// and fails if some of it cannot be given back. The node keeps its new size until it grows again or is
    /// restarted.
    Shrink {
        #[command(flatten)]
        to: Target,

        #[command(flatten)]
        grace: Grace,

        #[command(flatten)]
        which: Which,
    },
    /// Lend more memory of a node's machine again, up to what the node was started with
    Grow {
        #[command(flatten)]
        to: Target,

        #[command(flatten)]
        which: Which,
    },
}

/// How much the node is to lend.
#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
pub struct Target {
    /// How much less or more to lend, rounded up to whole regions
    #[arg(value_name = "SIZE")]
    by: Option<ByteSize>,

    /// How much the node lends afterwards, rounded down to whole regions; 0 empties it
    #[arg(long, value_name = "SIZE", value_parser = parse_target)]
    to: Option<u64>,
}

/// The node.
#[derive(Debug, clap::Args)]
pub struct Which {
    /// The node: its id, its host's name or its address, as `farpool status` shows them. Not necessary if the
    /// pool has only one
    #[arg(long, value_name = "NODE")]
    node: Option<String>,

    #[command(flatten)]
    broker: BrokerAt,

    /// Print JSON instead of a line
    #[arg(long)]
    json: bool,
}

/// Parses how much a node lends, which may be nothing.
fn parse_target(text: &str) -> Result<u64, String> {
    if text == "0" { Ok(0) } else { text.parse().map(|ByteSize(bytes)| bytes) }
}

/// What came of it. Names and meanings of the fields are stable; fields may be added.
#[derive(Debug, Serialize)]
struct Resized {
    node: String,
    /// Memory that the node has, lent or free.
    memory_bytes: u64,
    /// How much it is to have.
    target_bytes: u64,
    /// How much it had when it was started.
    most_bytes: u64,
    /// Leases that were taken back.
    revoked: u32,
    /// How much is leased and cannot be taken back.
    pinned_bytes: u64,
}

impl Target {
    /// The number of bytes, if the node lends `now` of `most` bytes. The node rounds it down to whole
    /// regions.
    fn bytes(&self, now: u64, most: u64, region_bytes: u64, grows: bool) -> Result<u64> {
        let whole = |by: ByteSize| by.0.div_ceil(region_bytes).saturating_mul(region_bytes);
        let target = match (self.to, self.by, grows) {
            (Some(to), ..) => to,
            (None, Some(by), true) => now.saturating_add(whole(by)),
            (None, Some(by), false) => now.saturating_sub(whole(by)),
            (None, None, _) => unreachable!("clap requires one of them"),
        };
        let refused = |text: String| Err(UsageError(text).into());
        if target > most {
            let text = "has no more to lend: start it with a larger --memory";
            return refused(format!("the node was started with {} and {text}", ByteSize(most)));
        }
        match grows {
            true if target < now => {
                refused(format!("the node lends {} already: use `farpool node shrink`", ByteSize(now)))
            }
            false if target > now => {
                refused(format!("the node lends only {}: use `farpool node grow`", shown(now)))
            }
            _ => Ok(target),
        }
    }
}

fn shown(bytes: u64) -> String {
    if bytes == 0 { "nothing".to_owned() } else { ByteSize(bytes).to_string() }
}

/// Resizes a node, and waits until it has its new size.
pub fn run(command: Resize) -> Result<()> {
    let (target, which, grace, grows) = match command {
        Resize::Shrink { to, which, grace } => (to, which, grace.duration(), false),
        Resize::Grow { to, which } => (to, which, Duration::ZERO, true),
    };
    let broker = which.broker.require()?;
    let resized = runtime()?.block_on(async {
        let node = Node::new(&broker, nodes::choose(nodes::living(&broker).await?, which.node.as_deref())?)?;
        let before = node.regions().await?;
        let region_bytes = before.region_bytes;
        let in_bytes = |regions: u32| u64::from(regions) * region_bytes;
        let most = in_bytes(before.regions_total);
        let bytes = target.bytes(in_bytes(before.regions_target), most, region_bytes, grows)?;
        let asked = ResizeRequest { memory_bytes: bytes, grace_ms: grace.as_millis() as u64 };
        let answer = node.resize(asked).await?;
        if answer.revoked > 0 {
            complain(format!(
                "farpool: {} are lent and are being taken back; they end within {:.1} s",
                ByteSize(in_bytes(answer.revoked)),
                answer.remaining_ms as f64 / 1e3
            ));
        }
        let reached = reach(&node, answer.regions_target, grows).await?;
        broker_knows(&broker, node.id(), before.regions_total.saturating_sub(reached.regions)).await;
        anyhow::Ok(Resized {
            node: node.id().to_string(),
            memory_bytes: in_bytes(reached.regions),
            target_bytes: in_bytes(answer.regions_target),
            most_bytes: most,
            revoked: answer.revoked,
            pinned_bytes: in_bytes(reached.pinned),
        })
    })?;
    if which.json {
        tell_json(&resized)?;
    }
    resized.check(grows)?;
    if which.json { Ok(()) } else { tell(resized.line()) }
}

/// Waits until the broker shows so many regions of the node as withdrawn, if it answers. It learns of them
/// from the node's next heartbeat, and the user may look at `farpool status` next.
async fn broker_knows(broker: &Located, node: NodeId, withdrawn: u32) {
    let give_up_at = Instant::now() + HEARTBEAT_PATIENCE;
    let is_shown = |shown: &NodeStatus| {
        let is_node = shown.address.as_ref().is_some_and(|address| NodeId(address.node) == node);
        is_node && shown.regions_withdrawn == withdrawn
    };
    while Instant::now() < give_up_at {
        let Ok(status) = status_of(broker).await else { return };
        if status.nodes.iter().any(is_shown) {
            return;
        }
        sleep(LOOK_AT_BROKER_EVERY).await;
    }
}

/// How many regions of a node have memory, and how many are leased and cannot be taken back.
struct Reached {
    regions: u32,
    pinned: u32,
}

/// Waits until the node has memory for at least `target` regions if it grows, or for at most so many, as long
/// as it comes nearer or leases are ending.
async fn reach(node: &Node, target: u32, grows: bool) -> Result<Reached> {
    let mut last = (None, Instant::now());
    loop {
        let table = node.regions().await?;
        let count = |is: &dyn Fn(&RegionState) -> bool| table.lent.iter().filter(|it| is(it)).count() as u32;
        let regions = table.regions_total.saturating_sub(count(&|region| region.withdrawn));
        let pinned = count(&|region| region.held && region.class == LeaseClass::Pinned.to_wire());
        let is_leaving = count(&|region| region.held && region.revoked) > 0;
        if last.0 != Some(regions) || is_leaving {
            last = (Some(regions), Instant::now());
        }
        let only_pinned = regions > target && regions == pinned;
        let is_reached = if grows { regions >= target } else { regions <= target };
        if is_reached || only_pinned || last.1.elapsed() >= REGION_DEADLINE {
            return Ok(Reached { regions, pinned });
        }
        sleep(LOOK_EVERY).await;
    }
}

impl Resized {
    fn line(&self) -> String {
        let (now, most) = (shown(self.memory_bytes), ByteSize(self.most_bytes));
        format!("node {} lends {now} of the {most} that it was started with", self.node)
    }

    /// Fails if the node has not come to its new size.
    fn check(&self, grows: bool) -> Result<()> {
        let (now, target, line) = (self.memory_bytes, self.target_bytes, self.line());
        if now > target && !grows {
            let left = ByteSize(now - target);
            match self.pinned_bytes > target {
                true => bail!(
                    "{line}; {left} are leased and cannot be taken back: only their owners (databases) can give them \
                     back"
                ),
                false => {
                    bail!("{line}; {left} have not come back yet: clients or network cards still use them")
                }
            }
        }
        if now < target && grows {
            let missing = ByteSize(target - now);
            bail!(
                "{line}; its machine has no memory to spare for the other {missing} yet; the node lends it as \
                 soon as there is"
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_shrinks_and_grows_by_a_size_or_to_one_within_what_it_was_started_with() {
        let bytes = |by: Option<u64>, to, grows| {
            let target = Target { by: by.map(ByteSize), to };
            target.bytes(60, 100, 10, grows).map_err(|error| error.to_string())
        };
        assert_eq!(bytes(Some(20), None, false), Ok(40));
        assert_eq!(bytes(Some(80), None, false), Ok(0));
        assert_eq!(bytes(Some(40), None, true), Ok(100));
        assert_eq!((bytes(Some(11), None, true), bytes(Some(11), None, false)), (Ok(80), Ok(40)));
        assert_eq!((bytes(None, Some(0), false), bytes(None, Some(60), true)), (Ok(0), Ok(60)));
        assert!(bytes(Some(41), None, true).unwrap_err().contains("--memory"));
        assert!(bytes(None, Some(59), true).unwrap_err().contains("shrink"));
        assert!(bytes(None, Some(61), false).unwrap_err().contains("grow"));
    }
}
