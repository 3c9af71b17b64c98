//! What the mover leaves alone, in which order it works, and what it logs.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};

use farpool_pool::Extent;
use farpool_wire::BlockWord;
use rustix_futex_sync::Mutex;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber, span};

use super::bare::Bare;
use super::*;
use crate::{FileCore, Rules, Shipped, StoreCore};

const DATA: usize = 4 * EXTENT_BYTES as usize;

fn extents(file: &FileCore) -> Vec<Arc<Extent>> {
    let map = file.map.read();
    map.stripes(0, u64::MAX).into_iter().filter_map(|member| map.extent(member)).collect()
}

/// The offsets that warnings and errors of one module name, on the thread for which this is set.
struct Log {
    module: &'static str,
    offsets: Arc<Mutex<Vec<Option<u64>>>>,
}

/// The offset among the fields of an event.
#[derive(Default)]
struct Offset(Option<u64>);

impl Visit for Offset {
    fn record_u64(&mut self, field: &Field, value: u64) {
        if field.name() == "offset" {
            self.0 = Some(value);
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn std::fmt::Debug) {}
}

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN && metadata.target() == self.module
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut offset = Offset::default();
        event.record(&mut offset);
        self.offsets.lock().push(offset.0);
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// Runs a task, and returns the offsets that the module's warnings and errors have named.
fn logged_by(module: &'static str, task: impl FnOnce()) -> Vec<Option<u64>> {
    let offsets = Arc::default();
    tracing::subscriber::with_default(Log { module, offsets: Arc::clone(&offsets) }, task);
    std::mem::take(&mut *offsets.lock())
}

/// Lets a mover try a rebuild three times for which there is no room, and returns how often it has warned.
pub(crate) fn warnings_of_three_failures(
    maintain: impl FnOnce(&StoreCore, &Pool, &Receiver<()>) + Send,
) -> usize {
    let rig = Rig::new(2, 1);
    let pool = rig.pool(TransportChoice::Shm);
    let store = Arc::new(StoreCore::new(pool.stock().clone()).unwrap());
    let mirror = store.create_as(Redundancy::Mirror);
    rig.runtime.block_on(mirror.reserve(0, 4 * EXTENT_BYTES)).unwrap(); // all that there is
    mirror.extent_at(0).unwrap().doubt();
    let (stop, stopped) = mpsc::channel();
    let (store, pool) = (&*store, &pool);
    std::thread::scope(|scope| {
        let run = move || maintain(store, pool, &stopped);
        let mover = scope.spawn(|| logged_by("farpool_file::moving", run));
        wait_until(|| {
            store.volume.ask_rebuild(); // it need not wait for the end of the pause
            store.volume_status().rebuild.attempts >= 3
        });
        drop(stop);
        mover.join().unwrap().len()
    })
}

#[test]
fn a_store_that_was_dropped_has_no_mover_any_more() {
    let rig = Rig::new(1, 8);
    let pool = rig.pool(TransportChoice::Auto);
    // Often enough to notice a mover that ends only a moment later.
    for _ in 0..50 {
        let store = FileStore::new(pool.clone()).unwrap();
        let core = Arc::downgrade(store.core());
        drop(store);
        assert_eq!(core.strong_count(), 0);
    }
}

#[test]
fn extents_that_need_not_move_stay_where_they_are() {
    let rig = Rig::new(2, 8);
    let bare = Bare::new(&rig);
    let files = [Redundancy::Mirror, Redundancy::Stripe].map(|kind| bare.filled(kind, &pattern(DATA, 3)));
    let places = || files.iter().flat_map(|file| extents(file)).collect::<Vec<_>>();
    let before = places();
    let move_out = || bare.run(async |core| bare.store.move_out(core, || false).await);
    move_out().unwrap();
    assert!(before.iter().zip(places()).all(|(before, now)| Arc::ptr_eq(before, &now)));
    // Nor is anything moved out of a region that has ended.
    before[0].region().node.give_up();
    move_out().unwrap();
    assert!(before.iter().zip(places()).all(|(before, now)| Arc::ptr_eq(before, &now)));
}

#[test]
fn a_member_whose_row_survives_its_loss_moves_after_data_without_a_copy() {
    let mut rig = Rig::new(2, 8);
    let bare = Bare::new(&rig);
    let [mirror, plain] =
        [Redundancy::Mirror, Redundancy::Stripe].map(|kind| bare.filled(kind, &pattern(DATA, 3)));
    bare.lose_all_regions(&rig);
    rig.start_node(8);
    rig.start_node(8);
    wait_until(|| rig.pool(TransportChoice::Auto).capacity().total_bytes >= 16 * REGION_BYTES);
    let rows = mirror.rows().unwrap();
    for row in 0..4 {
        bare.run(async |core| mirror.move_extent(core, rows.parity_of(row)).await).unwrap();
    }
    let moves = Cell::new(0);
    let stopped = || moves.replace(moves.get() + 1) == 4;
    bare.run(async |core| bare.store.move_out(core, stopped).await).unwrap();
    let leaving = |file| extents(file).iter().filter(|extent| extent.region().is_leaving()).count();
    assert_eq!((leaving(&plain), leaving(&mirror)), (0, 4));
}

#[test]
fn the_log_names_the_block_that_a_move_finds_damaged() {
    let rig = Rig::new(1, 8);
    let bare = Bare::new(&rig);
    let file = bare.filled(Redundancy::Stripe, &pattern(DATA, 3));
    let (words, extent) = (&bare.store.words, file.extent_at(EXTENT_BYTES).unwrap());
    let other = BlockWord::EMPTY.written(Shipped::checksum(&[7; BLOCK_BYTES]));
    words.store(words.place(&extent, 3), other);
    extent.doubt();
    let logged = logged_by("farpool_file::read", || {
        bare.run(async |core| file.move_extent(core, 1).await).unwrap();
    });
    assert_eq!(logged, [Some(EXTENT_BYTES + 3 * BLOCK)]);
}
