//! Regions as files of a local directory, read and written by a few threads, and by direct clients
//! themselves (`shared`).

use std::collections::{BTreeMap, VecDeque};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use farpool_throttle::Throttle;
use futures_util::FutureExt;
use futures_util::future::{BoxFuture, LocalBoxFuture};
use rustix::fs::{FallocateFlags, Mode, OFlags, StatVfs};
use rustix::io::Errno;
use rustix_futex_sync::{Condvar, Mutex};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use super::{Overflow, OverflowRegion};
use crate::error::OverflowError;
use crate::space::EXTENT_BYTES;

mod folder;
mod opening;

pub(crate) use folder::KeptBy;
pub(crate) use opening::Opening;

/// Threads that read and write: a local disk needs several requests at a time for its full speed.
const THREADS: usize = 4;
/// Transfers that wait or are in progress; each has a buffer of an extent's size.
const TRANSFERS: usize = 16;
/// How long the end of the process waits for work that has begun or is queued, such as freeing storage that
/// other processes have open.
const END_WITHIN: Duration = Duration::from_secs(2);
/// How long a file system may take to allocate a region.
const ALLOCATE_WITHIN: Duration = Duration::from_secs(5);
/// How long the room that was found last counts as current.
const ROOM_COUNTS_FOR: Duration = Duration::from_secs(1);
/// One part in so many of the file system stays free: databases may keep their data and logs there.
const KEPT_FREE_DIVISOR: u64 = 10;
/// File systems in memory, by their `f_type` (statfs(2)): tmpfs and ramfs.
const IN_MEMORY: [u64; 2] = [0x0102_1994, 0x8584_58f6];
/// File systems that write in place, by their `f_type`: ext4 (as ext2 and ext3) and xfs. On others (btrfs,
/// ZFS), overwriting allocated storage may need new space, and so fail when the disk is full (O1).
const IN_PLACE: [u64; 2] = [0xef53, 0x5846_5342];

/// A directory that gives regions.
pub(crate) struct Directory {
    workers: Arc<Workers>,
    path: PathBuf,
    /// Open, so that what is later mounted over the path does not matter.
    dir: Arc<File>,
    /// Whether `dir` is the owner's folder, in which regions have names.
    is_kept: bool,
    /// The files of regions that an earlier process has kept, and their sizes.
    found: Mutex<BTreeMap<u32, io::Result<(File, u64)>>>,
    limit_bytes: Option<u64>,
    /// Bytes of all regions.
    allocated: Arc<AtomicU64>,
    /// An allocation has not ended, perhaps because the file system hangs.
    allocating: Arc<AtomicBool>,
    room: Arc<Room>,
    /// Limits the log lines about allocations.
    allocation_log: Throttle,
    /// Limits the log lines about transfers, of all regions together.
    transfer_log: Arc<Throttle>,
}

/// The room that was found last.
struct Room {
    bytes: AtomicU64,
    looked_at: Mutex<Option<Instant>>,
    /// A thread is looking, and has perhaps been for a long time.
    looking: AtomicBool,
}

impl Room {
    /// Subtracts room that was taken, and has `room_bytes` measure anew as soon as no measurement runs.
    fn shrinks(&self, bytes: u64) {
        // Relaxed: a statistic, which pairs with nothing.
        let less = |room: u64| Some(room.saturating_sub(bytes));
        let _always = self.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        *self.looked_at.lock() = None;
    }
}

impl Directory {
    /// Checks that a directory can hold regions, and starts the threads. Removes files and folders to which
    /// nothing refers (F2 of `folder`). `kept`: regions get names, and a later process finds them again.
    pub(crate) fn open(
        path: &Path,
        limit_bytes: Option<u64>,
        kept: Option<&KeptBy>,
    ) -> Result<Directory, OverflowError> {
        let failed = |error: io::Error| OverflowError::Unusable { dir: path.to_owned(), reason: error };
        let flags = OFlags::DIRECTORY.bits() as i32;
        let dir = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(failed)?;
        let kind = rustix::fs::fstatfs(&dir).map_err(|errno| failed(errno.into()))?.f_type as u64;
        if IN_MEMORY.contains(&kind) {
            return Err(OverflowError::InMemory { dir: path.to_owned() });
        }
        if !IN_PLACE.contains(&kind) {
            return Err(OverflowError::NotInPlace { dir: path.to_owned() });
        }
        let workers = Workers::start().map_err(failed)?;
        let (all, own) = (dir.try_clone().map_err(failed)?, kept.map(KeptBy::own_folder));
        // It may take long, and nothing depends on it.
        workers.post(move || folder::clear_others(&all, own.as_ref()));
        let dir = match kept {
            Some(by) => folder::take(&dir, by).map_err(failed)?,
            None => dir,
        };
        drop(unnamed_file(&dir).map_err(|errno| failed(errno.into()))?); // whether files can be made there
        let found = kept.map(|by| kept_files(&dir, by)).unwrap_or_default();
        let free = rustix::fs::fstatvfs(&dir).map_err(|errno| failed(errno.into()))?;
        let allocated = Arc::new(AtomicU64::new(0));
        let bytes = AtomicU64::new(room(&free, limit_bytes, 0));
        let looked_at = Mutex::new(Some(Instant::now()));
        let room = Arc::new(Room { bytes, looked_at, looking: AtomicBool::new(false) });
        let (allocation_log, transfer_log) = (Throttle::new(), Arc::new(Throttle::new()));
        let (path, dir, allocating) = (path.to_owned(), Arc::new(dir), Arc::default());
        Ok(Directory {
            workers,
            path,
            dir,
            is_kept: kept.is_some(),
            found: Mutex::new(found),
            limit_bytes,
            allocated,
            allocating,
            room,
            allocation_log,
            transfer_log,
        })
    }

    fn region(&self, new: NewFile, bytes: u64) -> Arc<dyn OverflowRegion> {
        self.allocated.fetch_add(bytes, Ordering::Relaxed);
        self.room.shrinks(bytes);
        let (workers, allocated) = (self.workers.clone(), self.allocated.clone());
        let (file, name) = new.disarm();
        let (file, log) = (Some(Arc::new(file)), self.transfer_log.clone());
        Arc::new(RegionFile { file, name, bytes, workers, allocated, log })
    }

    fn complain(&self, reason: &str) {
        if let Some(left_out) = self.allocation_log.occurs(Instant::now()) {
            tracing::warn!(dir = %self.path.display(), reason, left_out, "the overflow directory gives no more storage");
        }
    }
}

/// Opens the files of the regions that a state names, if they are still there.
fn kept_files(folder: &File, by: &KeptBy) -> BTreeMap<u32, io::Result<(File, u64)>> {
    let open = |index| {
        let file = folder::open_file(folder, index)?;
        let bytes = file.metadata()?.len();
        Ok((file, bytes))
    };
    let opened = by.named.iter().map(|&index| (index, open(index)));
    let is_there =
        |file: &io::Result<_>| !matches!(file, Err(error) if error.kind() == io::ErrorKind::NotFound);
    opened.filter(|(_, file)| is_there(file)).collect()
}

/// A file that has no name: nothing of it is left when this process and its direct clients have ended,
/// however they end.
fn unnamed_file(dir: &File) -> rustix::io::Result<File> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(dir, c".", flags, Mode::RUSR | Mode::WUSR)?.into())
}

/// Bytes that may still be allocated.
fn room(file_system: &StatVfs, limit_bytes: Option<u64>, allocated: u64) -> u64 {
    let of_blocks = |blocks: u64| blocks.saturating_mul(file_system.f_frsize);
    let spare = of_blocks(file_system.f_blocks) / KEPT_FREE_DIVISOR;
    let in_file_system = of_blocks(file_system.f_bavail).saturating_sub(spare);
    limit_bytes.map_or(in_file_system, |limit| in_file_system.min(limit.saturating_sub(allocated)))
}

/// A region's file. Dropping it removes its name, unless it was [disarmed](Self::disarm).
struct NewFile {
    file: Option<File>,
    /// The folder and the number under which a later process finds it; `None`: it has no name.
    name: Option<(Arc<File>, u32)>,
}

impl NewFile {
    fn kept(file: File, folder: &Arc<File>, index: u32) -> Self {
        NewFile { file: Some(file), name: Some((folder.clone(), index)) }
    }

    fn unnamed(file: File) -> Self {
        NewFile { file: Some(file), name: None }
    }

    fn file(&self) -> &File {
        self.file.as_ref().expect("only disarming takes it")
    }

    /// The file, which keeps its name, and the name.
    fn disarm(mut self) -> (File, Option<(Arc<File>, u32)>) {
        (self.file.take().expect("only disarming takes it"), self.name.take())
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if let Some((folder, index)) = &self.name {
            folder::remove_region(folder, *index);
        }
    }
}

/// Allocates the storage of a region, if there is room for it: in a new file with the name of `index`, or in
/// one without a name. An error leaves no file.
fn allocate(
    dir: &Arc<File>,
    index: Option<u32>,
    bytes: u64,
    limit: Option<u64>,
    held: u64,
) -> io::Result<NewFile> {
    if room(&rustix::fs::fstatvfs(dir)?, limit, held) < bytes {
        return Err(Errno::NOSPC.into());
    }
    let new = match index {
        Some(index) => NewFile::kept(folder::create_file(dir, index)?, dir, index),
        None => NewFile::unnamed(unnamed_file(dir)?),
    };
    rustix::fs::fallocate(new.file(), FallocateFlags::empty(), 0, bytes)?;
    Ok(new)
}

impl Overflow for Directory {
    fn allocate(&self, index: u32, bytes: u64) -> BoxFuture<'_, Option<Arc<dyn OverflowRegion>>> {
        // Relaxed, here and below: the flag guards no other memory.
        if self.allocating.swap(true, Ordering::Relaxed) {
            return std::future::ready(None).boxed();
        }
        let (dir, limit) = (self.dir.clone(), self.limit_bytes);
        let (held, allocating) = (self.allocated.load(Ordering::Relaxed), self.allocating.clone());
        let index = self.is_kept.then_some(index);
        let allocated = self.workers.run(move || {
            let file = allocate(&dir, index, bytes, limit, held);
            allocating.store(false, Ordering::Relaxed);
            file
        });
        async move {
            let file = match tokio::time::timeout(ALLOCATE_WITHIN, allocated).await {
                Ok(Ok(file)) => file,
                Ok(Err(error)) => {
                    self.complain(&error.to_string());
                    return None;
                }
                Err(_) => {
                    self.complain("it does not answer");
                    return None;
                }
            };
            Some(self.region(file, bytes))
        }
        .boxed()
    }

    fn find(&self, index: u32, bytes: u64) -> io::Result<Option<Arc<dyn OverflowRegion>>> {
        let Some((file, found_bytes)) = self.found.lock().remove(&index).transpose()? else {
            return Ok(None);
        };
        Ok((found_bytes >= bytes).then(|| self.region(NewFile::kept(file, &self.dir, index), bytes)))
    }

    fn room_bytes(&self) -> u64 {
        let mut looked_at = self.room.looked_at.lock();
        let is_old = looked_at.is_none_or(|at| at.elapsed() >= ROOM_COUNTS_FOR);
        // Relaxed: the flag guards no other memory.
        if is_old && !self.room.looking.swap(true, Ordering::Relaxed) {
            *looked_at = Some(Instant::now());
            let (dir, limit, found) = (self.dir.clone(), self.limit_bytes, self.room.clone());
            let allocated = self.allocated.clone();
            self.workers.post(move || {
                if let Ok(free) = rustix::fs::fstatvfs(&*dir) {
                    let bytes = room(&free, limit, allocated.load(Ordering::Relaxed));
                    found.bytes.store(bytes, Ordering::Relaxed); // a statistic: pairs with nothing
                }
                found.looking.store(false, Ordering::Relaxed);
            });
        }
        self.room.bytes.load(Ordering::Relaxed)
    }
}

/// A region as a file.
struct RegionFile {
    /// `None` only while this is dropped.
    file: Option<Arc<File>>,
    /// The folder and the number under which a later process finds it; `None`: it has no name.
    name: Option<(Arc<File>, u32)>,
    bytes: u64,
    workers: Arc<Workers>,
    allocated: Arc<AtomicU64>,
    log: Arc<Throttle>,
}

impl std::fmt::Debug for RegionFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RegionFile").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl RegionFile {
    fn own_file(&self) -> &Arc<File> {
        self.file.as_ref().expect("only dropping takes it")
    }
}

impl Drop for RegionFile {
    fn drop(&mut self) {
        // To free the storage takes time, which the thread that drops this may not have.
        let (file, bytes, allocated) = (self.file.take(), self.bytes, self.allocated.clone());
        let guests_may_use = self.guests_may_use();
        self.workers.post(move || {
            // Other processes may have the file open. If this fails, its storage is freed when the last one
            // closes it.
            if guests_may_use && let Some(file) = &file {
                let _ = file.set_len(0);
            }
            drop(file);
            allocated.fetch_sub(bytes, Ordering::Relaxed);
        });
    }
}

impl OverflowRegion for RegionFile {
    fn discard(&self) {
        if let Some((folder, index)) = self.name.clone() {
            self.workers.post(move || folder::remove_region(&folder, index));
        }
    }

    /// O6.
    fn guests_may_use(&self) -> bool {
        self.name.is_none()
    }

    fn file(&self) -> Option<BorrowedFd<'_>> {
        self.guests_may_use().then(|| self.own_file().as_fd())
    }

    fn log_failure(&self, reason: &str) {
        if let Some(left_out) = self.log.occurs(Instant::now()) {
            tracing::error!(reason, left_out, "a transfer to or from the overflow directory has failed");
        }
    }

    fn read<'a>(&'a self, offset: u64, to: &'a mut [u8]) -> LocalBoxFuture<'a, io::Result<()>> {
        async move {
            let (mut buffer, file) = (self.workers.buffer(to.len()).await?, self.own_file().clone());
            let read = self.workers.run(move || {
                let read = file.read_exact_at(buffer.bytes(), offset);
                read.map(|()| buffer)
            });
            to.copy_from_slice(read.await?.bytes());
            Ok(())
        }
        .boxed_local()
    }

    fn write<'a>(&'a self, offset: u64, data: &'a [u8]) -> LocalBoxFuture<'a, io::Result<()>> {
        async move {
            let (mut buffer, file) = (self.workers.buffer(data.len()).await?, self.own_file().clone());
            buffer.bytes().copy_from_slice(data);
            self.workers.run(move || file.write_all_at(buffer.bytes(), offset)).await
        }
        .boxed_local()
    }
}

type Job = Box<dyn FnOnce() + Send>;

/// Threads that do what may block, and the buffers of transfers.
struct Workers {
    queue: Arc<Queue>,
    places: Arc<Semaphore>,
    spare: Arc<Mutex<Vec<Vec<u8>>>>,
}

/// Jobs in order of arrival. There are at most [`TRANSFERS`] transfers, one allocation, one look at the room,
/// and one release and one removal for each region.
#[derive(Default)]
struct Queue {
    jobs: Mutex<Jobs>,
    arrived: Condvar,
    thread_ended: Condvar,
}

#[derive(Default)]
struct Jobs {
    waiting: VecDeque<Job>,
    threads: usize,
    ended: bool,
}

impl Workers {
    fn start() -> io::Result<Arc<Workers>> {
        let places = Arc::new(Semaphore::new(TRANSFERS));
        // Made first: dropping it ends the threads that have started if another one cannot.
        let workers = Arc::new(Workers { queue: Arc::default(), places, spare: Arc::default() });
        for _ in 0..THREADS {
            let queue = workers.queue.clone();
            std::thread::Builder::new().name("overflow".into()).spawn(move || queue.work())?;
            workers.queue.jobs.lock().threads += 1;
        }
        Ok(workers)
    }

    fn post(&self, job: impl FnOnce() + Send + 'static) {
        self.queue.jobs.lock().waiting.push_back(Box::new(job));
        self.queue.arrived.notify_one();
    }

    /// Has a thread do something, even if the future is dropped.
    fn run<T, J>(&self, job: J) -> impl Future<Output = io::Result<T>> + Send + use<T, J>
    where
        T: Send + 'static,
        J: FnOnce() -> io::Result<T> + Send + 'static,
    {
        let (done, outcome) = oneshot::channel();
        self.post(move || {
            let _ = done.send(job()); // no receiver: it was given up
        });
        async { outcome.await.unwrap_or_else(|_| Err(io::ErrorKind::BrokenPipe.into())) }
    }

    /// A buffer of `bytes`, once one is free.
    async fn buffer(&self, bytes: usize) -> io::Result<Buffer> {
        debug_assert!(bytes as u64 <= EXTENT_BYTES);
        let place = self.places.clone().acquire_owned().await;
        let place = place.map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
        let spare = self.spare.lock().pop();
        let memory = spare.unwrap_or_else(|| vec![0; EXTENT_BYTES as usize]);
        let spare = Arc::downgrade(&self.spare);
        Ok(Buffer { memory, used: bytes, spare, _place: place })
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        let mut jobs = self.queue.jobs.lock();
        jobs.ended = true;
        self.queue.arrived.notify_all();
        // At most so long: a disk that hangs must not keep this process from ending.
        drop(self.queue.thread_ended.wait_timeout_while(jobs, END_WITHIN, |jobs| jobs.threads > 0));
    }
}

impl Queue {
    fn work(&self) {
        loop {
            let mut jobs = self.jobs.lock();
            let job = loop {
                if let Some(job) = jobs.waiting.pop_front() {
                    break job;
                }
                if jobs.ended {
                    jobs.threads -= 1;
                    self.thread_ended.notify_all();
                    return;
                }
                jobs = self.arrived.wait(jobs);
            };
            drop(jobs);
            job();
        }
    }
}

/// Memory for one transfer.
struct Buffer {
    memory: Vec<u8>,
    used: usize,
    spare: Weak<Mutex<Vec<Vec<u8>>>>,
    _place: OwnedSemaphorePermit,
}

impl Buffer {
    fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory[..self.used]
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(spare) = self.spare.upgrade() {
            spare.lock().push(std::mem::take(&mut self.memory));
        }
    }
}

#[cfg(test)]
mod tests;
