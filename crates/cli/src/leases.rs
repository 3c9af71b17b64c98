//! `farpool leases` lists the leases of a pool, and takes some of them back.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Result, bail};
use farpool_control::{Located, dial, explain};
use farpool_lease::{LeaseClass, MAX_GRACE};
use farpool_wire::control::broker_client::BrokerClient;
use farpool_wire::control::{RegionState, RevokeRequest, RevokeResponse};
use farpool_wire::{NodeId, OwnerId};
use serde::Serialize;
use tokio::time::{Instant, sleep};

use crate::errors::UsageError;
use crate::nodes::{self, Node};
use crate::output::{complain, tell, tell_json};
use crate::reach::{BrokerAt, runtime, sums_of};
use crate::size::ByteSize;
use crate::status::align;

/// How often the command asks whether leases have ended.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How much later than promised a lease may end: the node may be busy.
const ENDED_WITHIN: Duration = Duration::from_secs(10);
/// How long a broker may take to learn that leases have ended: some heartbeats.
const HEARD_WITHIN: Duration = Duration::from_secs(10);

/// Longest wait for the broker's answer to a revocation: it asks the nodes.
const REVOKE_DEADLINE: Duration = Duration::from_secs(10);
/// The longest grace that a node grants, in seconds.
const LONGEST_GRACE_S: u64 = MAX_GRACE.0 / 1_000;

/// How long a lease that is taken back lasts.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Grace {
    /// How long owners have to move their data, in seconds. A lease lasts at least as long as it was promised
    /// last, up to 10 s
    #[arg(long = "grace", value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(..=LONGEST_GRACE_S))]
    seconds: u64,
}

impl Grace {
    pub fn duration(self) -> Duration {
        Duration::from_secs(self.seconds)
    }
}

/// List the leases of a pool, and take some of them back
///
/// A lease is an owner's right to a region of a node's memory. Owners are mounts, programs that use the C
/// library, and databases. Leases of databases are pinned: they are not taken back.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool leases list
  farpool leases list --json | jq '.leases[] | select(.revoked)'
  farpool leases revoke 9f3c5a12d07b44e1 512MiB --grace 60")]
pub struct LeasesArgs {
    #[command(subcommand)]
    command: LeasesCommand,
}

#[derive(Debug, clap::Subcommand)]
enum LeasesCommand {
    /// Show each owner and how much memory of each node it has leased
    ///
    /// Asks each node, whose table is the truth. TAKEN BACK is how much of that is being taken back, and ENDS
    /// IN is the time until the last of these leases ends.
    List {
        #[command(flatten)]
        broker: BrokerAt,

        /// Print JSON, with each lease by itself, instead of a table
        #[arg(long)]
        json: bool,
    },
    /// Take leases of an owner back
    ///
    /// The nodes choose the newest of the owner's leases. The owner moves what lies there to other nodes, as
    /// far as there is room, and gives the regions back; what is still there when a lease ends is lost to the
    /// owner. The nodes lend the memory again: to give memory back to a node's machine, use `farpool node
    /// shrink`.
    ///
    /// Nodes take leases back one after the other, so that files with redundancy lose nothing. If SIZE is
    /// more than the owner has on one node, the command waits until the leases on that node have ended, and
    /// then goes on with the next node. It stops if leases ended before the owner had given them back.
    Revoke {
        /// The owner, as `farpool leases list` and `farpool status` show it
        #[arg(value_name = "OWNER", value_parser = parse_owner)]
        owner: OwnerId,

        /// How much memory to take back; rounded up to whole regions
        #[arg(value_name = "SIZE")]
        size: ByteSize,

        #[command(flatten)]
        grace: Grace,

        #[command(flatten)]
        broker: BrokerAt,
    },
}

/// Parses an owner's id.
fn parse_owner(text: &str) -> Result<OwnerId, String> {
    let is_id = text.len() == 16 && text.bytes().all(|digit| digit.is_ascii_hexdigit());
    let id = u64::from_str_radix(text, 16).ok().filter(|_| is_id);
    id.map(OwnerId).ok_or_else(|| "write the 16 hexadecimal digits that `farpool status` shows".to_owned())
}

/// The leases of a pool. Names and meanings of the fields are stable; fields may be added.
#[derive(Debug, Serialize)]
struct Listed {
    region_bytes: u64,
    leases: Vec<Listing>,
}

#[derive(Debug, Serialize)]
struct Listing {
    owner: String,
    node: String,
    host_name: String,
    region: u32,
    /// `revocable` or `pinned`; `unknown` if the node has a class that this program does not know.
    class: &'static str,
    /// Until the lease ends unless it is renewed.
    remaining_ms: u64,
    /// It is being taken back: no renewal puts its end off.
    revoked: bool,
    /// Clients with access, the owner itself included.
    clients: u32,
}

/// Lists or revokes.
pub fn run(args: LeasesArgs) -> Result<()> {
    match args.command {
        LeasesCommand::List { broker, json } => list(&broker.require()?, json),
        LeasesCommand::Revoke { owner, size, grace, broker } => {
            revoke(&broker.require()?, owner, size, grace.duration())
        }
    }
}

fn list(broker: &Located, json: bool) -> Result<()> {
    let (listed, failed) = runtime()?.block_on(async {
        let mut listed = Listed { region_bytes: 0, leases: Vec::new() };
        let mut failed = 0;
        for address in nodes::living(broker).await? {
            let host_name = address.host_name.clone();
            let id = NodeId(address.node);
            let asked = async { Node::new(broker, address)?.regions().await };
            match asked.await {
                Ok(table) => {
                    listed.region_bytes = table.region_bytes;
                    let held = table.lent.iter().filter(|state| state.held);
                    listed.leases.extend(held.map(|state| Listing::new(id, &host_name, state)));
                }
                Err(error) => {
                    complain(format!("farpool: {error:#}"));
                    failed += 1;
                }
            }
        }
        anyhow::Ok((listed, failed))
    })?;
    match json {
        true => tell_json(&listed)?,
        false if listed.leases.is_empty() && failed > 0 => {}
        false => listed.table().into_iter().try_for_each(tell)?,
    }
    match failed {
        0 => Ok(()),
        1 => bail!("the leases of one node are not listed"),
        _ => bail!("the leases of {failed} nodes are not listed"),
    }
}

impl Listing {
    fn new(node: NodeId, host_name: &str, state: &RegionState) -> Self {
        Listing {
            owner: OwnerId(state.owner).to_string(),
            node: node.to_string(),
            host_name: host_name.to_owned(),
            region: state.region,
            class: match LeaseClass::from_wire(state.class) {
                Some(LeaseClass::Pinned) => "pinned",
                Some(LeaseClass::Revocable) => "revocable",
                None => "unknown",
            },
            remaining_ms: state.remaining_ms,
            revoked: state.revoked,
            clients: state.grants,
        }
    }
}

impl Listed {
    /// One line for the leases of one owner and class on one node.
    fn table(&self) -> Vec<String> {
        if self.leases.is_empty() {
            return vec!["nothing is leased".to_owned()];
        }
        let mut lines: BTreeMap<_, Vec<&Listing>> = BTreeMap::new();
        for lease in &self.leases {
            let line = (&lease.owner, &lease.node, &lease.host_name, lease.class);
            lines.entry(line).or_default().push(lease);
        }
        let memory = |regions: usize| match regions {
            0 => "-".to_owned(),
            _ => ByteSize(regions as u64 * self.region_bytes).to_string(),
        };
        let cells =
            |((owner, node, host, class), leases): ((&String, &String, &String, &str), Vec<&Listing>)| {
                let revoked: Vec<_> = leases.iter().filter(|lease| lease.revoked).collect();
                let ends = revoked.iter().map(|lease| lease.remaining_ms).max();
                vec![
                    owner.clone(),
                    node.clone(),
                    host.clone(),
                    class.to_owned(),
                    memory(leases.len()),
                    memory(revoked.len()),
                    ends.map_or("-".to_owned(), |ms| format!("{:.1} s", ms as f64 / 1e3)),
                ]
            };
        let heads = ["OWNER", "NODE", "HOST", "CLASS", "LEASED", "TAKEN BACK", "ENDS IN"];
        align(&heads, lines.into_iter().map(cells).collect())
    }
}

/// Takes leases back on one node after the other. Members of a row lie on different nodes, so the owner has
/// moved what lay on one node before the next one takes leases back.
fn revoke(broker: &Located, owner: OwnerId, size: ByteSize, grace: Duration) -> Result<()> {
    runtime()?.block_on(async {
        let region_bytes = sums_of(broker).await?.region_bytes;
        if region_bytes == 0 {
            bail!("no node of the pool is alive");
        }
        let in_bytes = |regions: u32| ByteSize(u64::from(regions) * region_bytes);
        let mut missing = u32::try_from(size.0.div_ceil(region_bytes)).map_err(|_| too_large(size))?;
        // Since when the broker has taken nothing back. It may learn only from a heartbeat that leases have
        // ended.
        let mut idle_since: Option<Instant> = None;
        loop {
            let before = BeingRevoked::of(broker, owner).await?;
            let asked = RevokeRequest { owner: owner.0, count: missing, grace_ms: grace.as_millis() as u64 };
            let answer = ask_to_revoke(broker, asked).await?;
            if answer.revoked > 0 {
                let (taken, seconds) = (in_bytes(answer.revoked), answer.remaining_ms as f64 / 1e3);
                tell(format!("{taken} are being taken back; the leases end within {seconds:.1} s"))?;
                idle_since = None;
            } else {
                idle_since = idle_since.or(Some(Instant::now()));
            }
            missing = missing.saturating_sub(answer.revoked);
            if missing == 0 {
                return Ok(());
            }
            let is_stuck = idle_since.is_some_and(|since| since.elapsed() >= HEARD_WITHIN);
            if answer.revocable == 0 || is_stuck {
                bail!("{} are not taken back: {}", in_bytes(missing), answer.short_reason);
            }
            let expired = before.await_end(broker, owner).await?;
            if expired > 0 {
                bail!(
                    "{} are not taken back: {expired} leases expired, or were lost with their node, before their \
                     owners gave them back. If they were this owner's, it had no room or no time to move its \
                     data, and taking back more may lose data, also of files with redundancy: make room first \
                     (`farpool status`)",
                    in_bytes(missing)
                );
            }
            sleep(LOOK_EVERY).await;
        }
    })
}

/// What all living nodes say about an owner's leases that are being taken back.
struct BeingRevoked {
    /// When the last of them ends; `None`: there are none.
    ends_in: Option<Duration>,
    /// For each node, how many leases of any owner have expired there while they were being taken back, since
    /// the node started.
    expired: BTreeMap<NodeId, u64>,
}

impl BeingRevoked {
    async fn of(broker: &Located, owner: OwnerId) -> Result<Self> {
        let mut found = BeingRevoked { ends_in: None, expired: BTreeMap::new() };
        for address in nodes::living(broker).await? {
            let node = Node::new(broker, address)?;
            let table = node.regions().await?;
            let is_its = |state: &&RegionState| state.held && state.revoked && state.owner == owner.0;
            let ends_in =
                table.lent.iter().filter(is_its).map(|state| Duration::from_millis(state.remaining_ms));
            found.ends_in = found.ends_in.max(ends_in.max());
            found.expired.insert(node.id(), table.expired_revocations);
        }
        Ok(found)
    }

    /// Waits until no lease of the owner is being taken back. Returns how many have expired since `self`; a
    /// node that has died or was restarted since then counts as one.
    async fn await_end(&self, broker: &Located, owner: OwnerId) -> Result<u64> {
        let mut give_up_at = Instant::now();
        loop {
            let now = BeingRevoked::of(broker, owner).await?;
            let Some(ends_in) = now.ends_in else {
                let since = |(node, before): (&NodeId, &u64)| {
                    now.expired.get(node).and_then(|expired| expired.checked_sub(*before)).unwrap_or(1)
                };
                return Ok(self.expired.iter().map(since).sum());
            };
            if !ends_in.is_zero() {
                // More leases may be taken back meanwhile.
                give_up_at = give_up_at.max(Instant::now() + ends_in + ENDED_WITHIN);
            }
            if Instant::now() >= give_up_at {
                bail!("leases that are being taken back have not ended in time: see `farpool leases list`");
            }
            sleep(LOOK_EVERY).await;
        }
    }
}

fn too_large(size: ByteSize) -> UsageError {
    UsageError(format!("{size} is more than a pool can have"))
}

/// Asks once: a request that arrived twice would take back twice as much.
async fn ask_to_revoke(broker: &Located, request: RevokeRequest) -> Result<RevokeResponse> {
    let mut client = BrokerClient::new(dial(&broker.address, broker.tls.as_ref())?);
    let asked = tokio::time::timeout(REVOKE_DEADLINE, client.revoke(request)).await;
    let reason = match asked {
        Ok(Ok(answer)) => return Ok(answer.into_inner()),
        Ok(Err(status)) => explain(&status),
        Err(_) => "it did not answer in time".to_owned(),
    };
    let broker = &broker.address;
    bail!("no answer from the broker at {broker}: {reason}; `farpool leases list` shows what is taken back")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_one_line_for_an_owner_s_leases_of_one_class_on_one_node() {
        let lease = |owner, node, class: LeaseClass, revoked| {
            let state = RegionState {
                owner,
                class: class.to_wire(),
                remaining_ms: 2_500,
                revoked,
                ..Default::default()
            };
            Listing::new(NodeId(node), "db-1", &state)
        };
        let leases = vec![
            lease(1, 5, LeaseClass::Revocable, false),
            lease(1, 5, LeaseClass::Revocable, true),
            lease(1, 5, LeaseClass::Pinned, false),
            lease(2, 5, LeaseClass::Revocable, false),
        ];
        let table = Listed { region_bytes: 64 << 20, leases }.table();
        let line = |at: usize| table[at].split_whitespace().skip(3).collect::<Vec<_>>().join(" ");
        assert_eq!((table.len(), line(1)), (4, "pinned 64 MiB - -".to_owned()));
        assert_eq!(line(2), "revocable 128 MiB 64 MiB 2.5 s");
        assert_eq!(Listed { region_bytes: 1, leases: Vec::new() }.table(), ["nothing is leased"]);
    }

    #[test]
    fn an_owner_is_named_by_all_its_digits() {
        assert_eq!(parse_owner(&OwnerId(0x1f).to_string()), Ok(OwnerId(0x1f)));
        for text in ["1f", "", "zzzzzzzzzzzzzzzz", "+00000000000001f"] {
            assert!(parse_owner(text).is_err(), "{text}");
        }
    }
}
