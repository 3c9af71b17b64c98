//! The owner dies, with all processes that work on its files. Another owner takes over what is left: the
//! block words and the journal.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use farpool_fabric::sim::HostId;
use farpool_fabric::{Peer, SharedMemory, create_sealed};
use farpool_file::{KEPT_WORDS_BYTES, StoreCore};
use farpool_keep::{Kept, MemoryJournal};
use farpool_pool::{Adoption, EXTENT_BYTES, OVERFLOW_NODE, Stock, StockConfig};
use farpool_wire::control::NodeAddress;
use farpool_wire::{NodeId, OwnerId, RegionId};

use super::keeper::{self, LEASES_PER_REQUEST};
use super::overflow::{Disk, Giver};
use super::{Phase, REGION_EXTENTS, Run, client};
use crate::plane::Plane;
use crate::plane::post::{Answer, Post, Question};

/// A successor asks nodes whether leases are still in force for the duration of a lease divided by this
/// number. `ANSWER_PART` limits the wait for one answer in the same way.
const ADOPT_PART: u64 = 4;
const ANSWER_PART: u64 = 12;
const ADOPT_PAUSE: Duration = Duration::from_millis(50);

/// The state that outlives an owner.
pub(super) struct Legacy {
    owner: OwnerId,
    limit_regions: Option<u64>,
    words: SharedMemory,
    journal: RefCell<Arc<MemoryJournal>>,
}

impl Legacy {
    pub(super) fn new(owner: OwnerId, limit_regions: Option<u64>) -> Self {
        let fd = create_sealed("farpool-kept", KEPT_WORDS_BYTES).expect("memory for words");
        let words = SharedMemory::of_file(fd, KEPT_WORDS_BYTES).expect("memory for words");
        Legacy { owner, limit_regions, words, journal: RefCell::default() }
    }

    /// The block words, for one more owner.
    pub(super) fn words(&self) -> SharedMemory {
        let fd = self.words.fd().try_clone_to_owned().expect("a descriptor");
        SharedMemory::of_file(fd, KEPT_WORDS_BYTES).expect("memory for words")
    }
}

/// A stock for this owner.
pub(super) fn stock_of(
    plane: &Plane,
    host: HostId,
    owner: OwnerId,
    limit_regions: Option<u64>,
    legacy: Option<&Legacy>,
) -> Stock {
    let here = plane.nodes.iter().find(|node| node.host == host).map(|node| node.id);
    let journal = legacy.map(|legacy| legacy.journal.borrow().clone());
    Stock::new(StockConfig {
        owner,
        region_bytes: REGION_EXTENTS * EXTENT_BYTES,
        limit_regions,
        clock: Arc::new(plane.world.clock(host)),
        reach: Box::new(move |address: &NodeAddress| Peer {
            node: NodeId(address.node),
            tcp: None,
            verbs: None,
            shm_socket: (here == Some(NodeId(address.node))).then(|| "near".into()),
        }),
        journal: journal.map(|journal| journal as _),
    })
}

/// The stock with its overflow directory, if there is one.
pub(super) fn with_disk(stock: Stock, disk: Option<&Arc<Disk>>) -> Stock {
    match disk {
        Some(disk) => stock.with_overflow(Arc::new(Giver(disk.clone()))),
        None => stock,
    }
}

/// Kills all processes that work on files. Another owner starts after a while. Returns when that owner has
/// taken over, or has died, too.
pub(super) async fn owner_dies(run: &Rc<Run>, lasting: Duration) {
    let Some(legacy) = &run.legacy else { return };
    if run.phase.get() != Phase::Busy {
        return;
    }
    // This comes first, because dropping the values of the dead processes must not change what is left.
    legacy.journal.borrow().abandon();
    run.store().abandon();
    let clients = std::mem::take(&mut *run.clients.borrow_mut());
    let home = run.world.add_process(run.host);
    run.tasks.kill(run.home());
    clients.iter().for_each(|(process, _)| run.tasks.kill(*process));
    run.home.set(home);
    run.successors_wanted.set(run.successors_wanted.get().max(clients.len()));
    run.note_regions();
    run.world.note("the owner dies with {} clients", &[clients.len() as u64]);
    run.world.sleep(lasting).await;
    if run.home() != home {
        return; // this successor has died, too
    }
    let next = Arc::new(legacy.journal.borrow().successor());
    *legacy.journal.borrow_mut() = next;
    let stock = stock_of(&run.plane, run.host, legacy.owner, legacy.limit_regions, Some(legacy));
    *run.stock.borrow_mut() = Arc::new(with_disk(stock, run.disk.as_ref()));
    let taking_over = run.clone();
    run.tasks.spawn(home, async move { take_over(&taking_over).await });
    while run.home() == home && run.successors_wanted.get() > 0 {
        run.world.sleep(ADOPT_PAUSE).await;
    }
}

async fn take_over(run: &Rc<Run>) {
    let Some(legacy) = &run.legacy else { return };
    let kept = legacy.journal.borrow().kept();
    let (stock, post) = (run.stock(), keeper::post_of(run));
    let mut adoption = stock.begin_adoption(&kept);
    let until_ns = run.world.now_ns() + run.ttl.0 / ADOPT_PART * 1_000_000;
    loop {
        for (_, renewal) in stock.adoption_questions(&adoption, LEASES_PER_REQUEST) {
            let question = Question::Renew(renewal.request(stock.owner()));
            let node = run.node(renewal.node).process.get();
            let patience = Duration::from_millis(run.ttl.0 / ANSWER_PART);
            if let Some(Answer::Renewed(answer)) = post.ask(node, question, patience).await {
                stock.adoption_answered(&mut adoption, &renewal, &answer);
            }
        }
        if adoption.is_answered() || run.world.now_ns() >= until_ns {
            break;
        }
        run.world.sleep_by(run.host, ADOPT_PAUSE).await;
    }
    stock.adopt_overflow(&adoption).expect("the disk has what it keeps");
    judge_overflow(run);
    stock.adoption_ends(&mut adoption);
    adopt_files(run, &kept, adoption, post).await;
}

/// Checks that the successor has all regions that the disk keeps: those are never lost (O2).
fn judge_overflow(run: &Run) {
    let held = run.stock().numbered_regions();
    for index in run.disk.iter().flat_map(|disk| disk.kept()) {
        let id = RegionId { node: OVERFLOW_NODE, index };
        if !held.iter().any(|held| held.region.id == id) {
            run.complain(format!("region {index} of the overflow directory is missing after the takeover"));
        }
    }
}

async fn adopt_files(run: &Rc<Run>, kept: &Kept, adoption: Adoption, post: Rc<Post>) {
    let Some(legacy) = &run.legacy else { return };
    run.note_regions();
    let store = Arc::new(StoreCore::keeping(run.stock(), legacy.words()).expect("a table of words"));
    *run.store.borrow_mut() = store.clone();
    keeper::start_keeper(run, post);
    let wanted: Vec<Option<u64>> = run.files.borrow().iter().map(|(_, file)| file.kept_id()).collect();
    let adopted = store.adopt(kept, adoption, |id| wanted.contains(&Some(id)));
    run.world.note("another owner takes over {} files", &[adopted.len() as u64]);
    store.settle(&run.session(run.home()), &adopted).await;
    // As in production: nothing is moved before the locks are settled.
    keeper::start_mover(run);
    for ((number, file), id) in run.files.borrow_mut().iter_mut().zip(wanted) {
        match id.and_then(|id| adopted.get(&id)) {
            Some(found) => *file = found.clone(),
            None => run.complain(format!("file {number} is missing after the takeover")),
        }
    }
    for _ in 0..run.successors_wanted.take() {
        client::start(run);
    }
}
