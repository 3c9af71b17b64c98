//! Runs the tasks of all processes on one thread, in an order that the seed determines.
//!
//! X1. The seed chooses one of several ready tasks. A task of a paused process waits; when a process dies,
//!     all its tasks are dropped at once.
//! X2. Endpoints are polled when something has arrived for their process or a deadline of theirs is due.
//! X3. Time passes only when no task can run and nothing has arrived for an endpoint.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use rustix_futex_sync::Mutex;

use crate::Endpoint;
use crate::sim::clock::true_time_of;
use crate::sim::{ProcessId, Random, World};

/// Most polls of tasks without time passing: with more, tasks only wake each other.
const MAX_POLLS_PER_INSTANT: u32 = 100_000;

/// Why a run ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RunEnd {
    /// Every task has ended.
    Finished,
    /// Tasks are left, but nothing will ever wake them.
    Stuck,
    /// The given time has been reached.
    OutOfTime,
}

/// The executor. Its thread is the only one in the world.
pub struct Executor {
    tasks: Tasks,
    random: Random,
    running: BTreeMap<u64, Task>,
    last_task: u64,
    endpoints: Vec<(ProcessId, Endpoint)>,
}

struct Task {
    process: ProcessId,
    future: Pin<Box<dyn Future<Output = ()>>>,
    waker: Waker,
}

/// Starts tasks and ends processes, from inside and outside of tasks. Clones share it.
#[derive(Clone)]
pub struct Tasks {
    world: World,
    wanted: Rc<RefCell<Vec<Wanted>>>,
    ready: Arc<Mutex<Vec<u64>>>,
}

enum Wanted {
    Task(ProcessId, Pin<Box<dyn Future<Output = ()>>>),
    Endpoint(ProcessId, Endpoint),
    Kill(ProcessId),
}

impl Tasks {
    /// Starts a task of a process.
    pub fn spawn(&self, process: ProcessId, future: impl Future<Output = ()> + 'static) {
        self.wanted.borrow_mut().push(Wanted::Task(process, Box::pin(future)));
    }

    /// Polls an endpoint of a process from now on.
    pub fn adopt(&self, process: ProcessId, endpoint: Endpoint) {
        self.wanted.borrow_mut().push(Wanted::Endpoint(process, endpoint));
    }

    /// Ends a process at once: none of its tasks runs again, and its connections end.
    pub fn kill(&self, process: ProcessId) {
        self.wanted.borrow_mut().push(Wanted::Kill(process));
    }
}

struct TaskWaker {
    task: u64,
    ready: Arc<Mutex<Vec<u64>>>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let mut ready = self.ready.lock();
        if !ready.contains(&self.task) {
            ready.push(self.task);
        }
    }
}

impl Executor {
    /// Runs tasks in `world`, in the order that its seed gives.
    pub fn new(world: World) -> Self {
        let seed = world.lock().config.seed;
        let tasks = Tasks { world, wanted: Rc::default(), ready: Arc::default() };
        let random = Random::new(seed, 2);
        Executor { tasks, random, running: BTreeMap::new(), last_task: 0, endpoints: Vec::new() }
    }

    /// The handle by which tasks start others.
    pub fn tasks(&self) -> Tasks {
        self.tasks.clone()
    }

    /// Runs until all tasks have ended, none can go on, or true time has reached `until_ns`.
    pub fn run(&mut self, until_ns: u64) -> RunEnd {
        let mut polls = 0;
        loop {
            self.do_what_is_wanted();
            if self.poll_a_task() {
                polls += 1;
                assert!(polls < MAX_POLLS_PER_INSTANT, "tasks keep each other awake and no time passes");
                continue;
            }
            if self.poll_endpoints() {
                continue;
            }
            polls = 0;
            if self.running.is_empty() {
                return RunEnd::Finished;
            }
            match self.let_time_pass(until_ns) {
                Some(end) => return end,
                None => continue,
            }
        }
    }

    fn do_what_is_wanted(&mut self) {
        loop {
            let wanted = std::mem::take(&mut *self.tasks.wanted.borrow_mut());
            if wanted.is_empty() {
                return;
            }
            for wanted in wanted {
                match wanted {
                    Wanted::Task(process, future) => self.start(process, future),
                    Wanted::Endpoint(process, endpoint) => self.endpoints.push((process, endpoint)),
                    Wanted::Kill(process) => self.end(process),
                }
            }
        }
    }

    fn start(&mut self, process: ProcessId, future: Pin<Box<dyn Future<Output = ()>>>) {
        if !self.tasks.world.is_alive(process) {
            return;
        }
        self.last_task += 1;
        let task = self.last_task;
        let waker = Waker::from(Arc::new(TaskWaker { task, ready: self.tasks.ready.clone() }));
        waker.wake_by_ref();
        self.running.insert(task, Task { process, future, waker });
    }

    fn end(&mut self, process: ProcessId) {
        let mut state = self.tasks.world.lock();
        state.note("process {} is killed", &[process.0 as u64]);
        state.processes[process.0].alive = false;
        drop(state);
        // Dropping tasks drops links, which check whether their process is alive.
        self.running.retain(|_, task| task.process != process);
        self.endpoints.retain(|(of, _)| *of != process);
    }

    /// Polls one ready task, if any can run.
    fn poll_a_task(&mut self) -> bool {
        let task = {
            let mut ready = self.tasks.ready.lock();
            if ready.is_empty() {
                return false;
            }
            let state = self.tasks.world.lock();
            ready.retain(|task| self.running.contains_key(task));
            let runs = |task: &&u64| {
                let process = self.running[*task].process;
                state.processes[process.0].paused_until_ns <= state.now_ns
            };
            let runnable = ready.iter().filter(runs).count();
            if runnable == 0 {
                return false;
            }
            let chosen = if runnable == 1 { 0 } else { self.random.index(runnable) };
            let task = *ready.iter().filter(runs).nth(chosen).expect("counted above");
            ready.retain(|other| *other != task);
            task
        };
        let running = self.running.get_mut(&task).expect("ready tasks are running");
        let waker = running.waker.clone();
        let mut context = Context::from_waker(&waker);
        if let Poll::Ready(()) = running.future.as_mut().poll(&mut context) {
            self.running.remove(&task);
        }
        true
    }

    /// Polls the endpoints of one process for which something has arrived.
    fn poll_endpoints(&mut self) -> bool {
        let process = {
            let mut state = self.tasks.world.lock();
            let now_ns = state.now_ns;
            let waits = state.processes.iter().position(|process| {
                process.has_arrivals && process.alive && process.paused_until_ns <= now_ns
            });
            let Some(process) = waits else { return false };
            state.processes[process].has_arrivals = false;
            ProcessId(process)
        };
        for (_, endpoint) in self.endpoints.iter().filter(|(of, _)| *of == process) {
            endpoint.poll();
        }
        true
    }

    /// Advances to the next event or the next deadline of an endpoint, whichever is first.
    fn let_time_pass(&mut self, until_ns: u64) -> Option<RunEnd> {
        let mut due: Option<(u64, usize)> = None;
        for (place, (process, endpoint)) in self.endpoints.iter().enumerate() {
            let Some(local_ns) = endpoint.next_deadline_ns() else { continue };
            let state = self.tasks.world.lock();
            let rate_ppm = state.wires.hosts[state.processes[process.0].host.0].rate_ppm;
            let at_ns = state.when_running(*process, true_time_of(local_ns, rate_ppm));
            due = Some(due.map_or((at_ns, place), |earlier| earlier.min((at_ns, place))));
        }
        let mut state = self.tasks.world.lock();
        let event_ns = state.events.next_at();
        let next_ns = [event_ns, due.map(|(at_ns, _)| at_ns)].into_iter().flatten().min();
        let Some(next_ns) = next_ns else { return Some(RunEnd::Stuck) };
        if next_ns > until_ns {
            return Some(RunEnd::OutOfTime);
        }
        match due {
            Some((at_ns, place)) if event_ns.is_none_or(|event_ns| at_ns < event_ns) => {
                state.advance_to(at_ns);
                drop(state);
                self.endpoints[place].1.poll();
            }
            _ => {
                state.step();
            }
        }
        None
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        // Futures may hold handles of this executor: without this, both would keep each other alive.
        self.running.clear();
        self.endpoints.clear();
        self.tasks.wanted.borrow_mut().clear();
    }
}
