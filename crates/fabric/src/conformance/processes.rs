//! Clients in processes of their own: they can be stopped between any two instructions.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use farpool_wire::{Epoch, GrantMode, NodeId};
use rustix::process::{Pid, Signal, kill_process};

use super::Carrier;
use super::rig::{DEADLINE, EPOCH, KEY, Member, Rig, SuiteHost, at, endpoint, key_of, region, wait_until};
use crate::{CallAnswer, OpError, Peer, Queue, Uncertain, block_on};

/// Environment variable that tells a test program that it is a process of a check: it says where the node is,
/// or that the process is the node.
const CHILD: &str = "FARPOOL_SUITE_CHILD";
const NODE_ROLE: &str = "node";
/// The test that [`conformance_tests!`](crate::conformance_tests) makes of [`run_as_child`].
const CHILD_TEST: &str = "takes_part_as_a_process_of_a_check";
/// Marks a child's answers among what the test harness prints.
const ANSWER: &str = "farpool-suite: ";

const PROCESSES: u64 = 3;
const ADDITIONS: u64 = 300;
const COUNTER_AT: u64 = 1 << 20;

const STOPS: u64 = 60;
/// Long enough that a stop in the middle of a copy is likely.
const FLOOD_BYTES: usize = 256 << 10;
const FLOOD_AT: u64 = 4096;
const FLOOD: u8 = 0xBB;
const OURS: u8 = 0xEE;

pub fn additions_of_several_processes_are_all_counted(carrier: &dyn Carrier) {
    let rig = Rig::new(carrier);
    if carrier.reaches_other_processes() {
        let mut children: Vec<_> = (0..PROCESSES).map(|_| ChildClient::spawn(&rig.peer)).collect();
        children.iter_mut().for_each(|child| child.say("add"));
        children.iter_mut().for_each(|child| child.expect("added"));
    } else {
        (0..PROCESSES).for_each(|_| add(&Member::join(carrier, &rig.peer, EPOCH, KEY)));
    }
    let queue = rig.attached();
    assert_eq!(rig.read(&queue, COUNTER_AT, 8).unwrap(), (PROCESSES * ADDITIONS).to_le_bytes());
}

pub fn what_a_client_stopped_in_a_copy_goes_on_to_write_after_its_fence_is_never_seen(carrier: &dyn Carrier) {
    if !carrier.reaches_other_processes() {
        return; // there is no process to stop: the simulator pauses its own
    }
    let rig = Rig::new(carrier);
    let owner = Member::join(carrier, &rig.peer, EPOCH, KEY);
    let mut child = ChildClient::spawn(&rig.peer);
    for round in 0..STOPS {
        let epoch = Epoch(100 + round);
        rig.host.regions.open_grant(0, epoch, key_of(epoch), GrantMode::ReadWrite);
        child.say(&format!("flood {}", epoch.0));
        child.expect("flooding");
        (0..round * 7919 % 5000).for_each(|_| std::hint::spin_loop()); // an arbitrary moment
        child.stop();
        rig.host.regions.fence_grant(0, epoch).expect("memory to move to");
        owner.write_while_memory_moves(FLOOD_AT, &[OURS; FLOOD_BYTES]);
        child.resume();
        child.expect("ended");
        let found = owner.read(FLOOD_AT, FLOOD_BYTES).expect("nothing was fenced since");
        let foreign = found.iter().position(|&byte| byte != OURS);
        assert_eq!(foreign, None, "a fenced client's byte in round {round}");
    }
}

pub fn a_killed_node_process_wakes_the_clients_that_wait_for_it(carrier: &dyn Carrier) {
    if !carrier.reaches_other_processes() {
        return; // the simulator has its own ways to end a node
    }
    let mut node = ChildNode::spawn();
    let endpoint = endpoint(carrier, DEADLINE);
    let queue = endpoint.open(node.peer.clone()).expect("the node listens");
    block_on(&endpoint, queue.attach(region(0), EPOCH, KEY)).expect("the node answers");
    call(&queue, b"echo awake").expect("the node answers");
    node.process.say("stall");
    node.process.expect("stalled");
    let (asked, may_kill) = channel();
    let killer = std::thread::spawn(move || {
        may_kill.recv().expect("the check goes on");
        drop(node);
    });
    // When the node is killed, this thread is awake, falling asleep or asleep.
    asked.send(()).expect("the killer waits for this");
    let started = Instant::now();
    let ended = call(&queue, b"echo asleep");
    assert!(matches!(ended, Err(OpError::Unknown { cause: Uncertain::ConnectionLost, .. })), "{ended:?}");
    assert!(started.elapsed() < DEADLINE, "the node's end was not noticed");
    killer.join().expect("the killer only drops the node");
}

pub fn a_node_process_that_is_stopped_is_waited_for_until_the_deadline(carrier: &dyn Carrier) {
    if !carrier.reaches_other_processes() {
        return;
    }
    let node = ChildNode::spawn();
    let endpoint = endpoint(carrier, Duration::from_millis(300));
    let queue = endpoint.open(node.peer.clone()).expect("the node listens");
    let mut calls = 0;
    // Slow machines may miss a deadline as short as this one by themselves.
    let attach = || block_on(&endpoint, queue.attach(region(0), EPOCH, KEY));
    while attach().is_err() || call(&queue, b"echo awake").is_err() {
        calls += 1;
        assert!(calls < 20 && queue.reconnect().is_ok(), "the node does not answer");
    }
    node.process.stop();
    let started = endpoint.now_ns();
    let ended = call(&queue, b"echo stopped");
    let waited = Duration::from_nanos(endpoint.now_ns() - started);
    assert!(matches!(ended, Err(OpError::Unknown { cause: Uncertain::Deadline, .. })), "{ended:?}");
    assert!(waited >= Duration::from_millis(300) && waited < Duration::from_secs(10), "{waited:?}");
    node.process.resume();
    queue.reconnect().expect("the node listens again");
    drop(endpoint);
}

fn call(queue: &Queue, request: &[u8]) -> Result<CallAnswer, OpError> {
    let endpoint = queue.endpoint();
    let mut buffer = endpoint.arena().take(request.len()).expect("an arena of some MiB");
    buffer.copy_from_slice(request);
    block_on(endpoint, queue.call(buffer, request.len()))
}

/// The part of a test program that a check has started as a process; does nothing otherwise.
pub fn run_as_child(carrier: &dyn Carrier) {
    let Ok(peer) = std::env::var(CHILD) else { return };
    if peer == NODE_ROLE {
        return serve_as_child(carrier);
    }
    let peer = decode_peer(&peer);
    for line in std::io::stdin().lines() {
        let line = line.expect("the check's own words");
        match line.split_once(' ') {
            None if line == "add" => {
                add(&Member::join(carrier, &peer, EPOCH, KEY));
                answer("added");
            }
            Some(("flood", epoch)) => {
                let epoch = Epoch(epoch.parse().expect("a number"));
                flood(&Member::join(carrier, &peer, epoch, key_of(epoch)));
                answer("ended");
            }
            _ => panic!("no such task: {line}"),
        }
    }
}

fn serve_as_child(carrier: &dyn Carrier) {
    let host = SuiteHost::new();
    let (peer, _guard) = carrier.serve(host.clone(), None);
    answer(&encode_peer(&peer));
    for line in std::io::stdin().lines() {
        assert_eq!(line.expect("the check's own words"), "stall");
        host.stalled.store(true, Ordering::Relaxed); // a flag of the test, ordered by the answer
        answer("stalled");
    }
}

fn answer(text: &str) {
    eprintln!("{ANSWER}{text}");
}

fn add(member: &Member) {
    for _ in 0..ADDITIONS {
        let addition = member.queue.fetch_and_add(at(COUNTER_AT), EPOCH, 1);
        block_on(&member.endpoint, addition).expect("the grant is not fenced");
    }
}

/// Writes until refused.
fn flood(member: &Member) {
    let mut first = true;
    while member.write(FLOOD_AT, &[FLOOD; FLOOD_BYTES]).is_ok() {
        if std::mem::take(&mut first) {
            answer("flooding");
        }
    }
}

fn encode_peer(peer: &Peer) -> String {
    let tcp = peer.tcp.map(|address| address.to_string()).unwrap_or_default();
    let verbs = peer.verbs.map(|address| address.to_string()).unwrap_or_default();
    let shm = peer.shm_socket.as_ref().map(|path| path.display().to_string()).unwrap_or_default();
    format!("{} {tcp} {verbs} {shm}", peer.node.0)
}

fn decode_peer(text: &str) -> Peer {
    let mut parts = text.splitn(4, ' ');
    let mut part = || parts.next().expect("four parts");
    let node = NodeId(part().parse().expect("a number"));
    let tcp = part().parse().ok();
    let verbs = part().parse().ok();
    let shm_socket = Some(part()).filter(|path| !path.is_empty()).map(Into::into);
    Peer { node, tcp, verbs, shm_socket }
}

/// A process of a check. Killed when dropped.
struct ChildClient {
    process: Child,
    tasks: ChildStdin,
    answers: Receiver<String>,
}

/// A node in a process of its own. Killed when dropped.
struct ChildNode {
    process: ChildClient,
    peer: Peer,
}

impl ChildNode {
    fn spawn() -> ChildNode {
        let process = ChildClient::spawn_as(NODE_ROLE);
        let peer = decode_peer(&process.next_answer());
        ChildNode { process, peer }
    }
}

impl ChildClient {
    fn spawn(peer: &Peer) -> ChildClient {
        Self::spawn_as(&encode_peer(peer))
    }

    fn spawn_as(role: &str) -> ChildClient {
        let program = std::env::current_exe().expect("a test program has a path");
        let mut process = Command::new(program)
            .args(["--exact", CHILD_TEST, "--nocapture"])
            .env(CHILD, role)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("another process can be started");
        let tasks = process.stdin.take().expect("asked for");
        let output = BufReader::new(process.stderr.take().expect("asked for"));
        let (sender, answers) = channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                match line.strip_prefix(ANSWER) {
                    Some(answer) => drop(sender.send(answer.to_owned())), // the check may have ended
                    None => eprintln!("child: {line}"),
                }
            }
        });
        ChildClient { process, tasks, answers }
    }

    fn say(&mut self, task: &str) {
        writeln!(self.tasks, "{task}").expect("the child lives");
    }

    fn expect(&mut self, wanted: &str) {
        assert_eq!(self.next_answer(), wanted, "from the child");
    }

    fn next_answer(&self) -> String {
        self.answers.recv_timeout(DEADLINE + Duration::from_secs(10)).expect("the child answers")
    }

    fn stop(&self) {
        kill_process(self.pid(), Signal::STOP).expect("the child lives");
        let stat = format!("/proc/{}/stat", self.process.id());
        wait_until(|| {
            let stat = std::fs::read_to_string(&stat).expect("the child lives");
            // The state follows the name, which is in brackets and may hold anything.
            stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T'))
        });
    }

    fn resume(&self) {
        kill_process(self.pid(), Signal::CONT).expect("the child lives");
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.process)
    }
}

impl Drop for ChildClient {
    fn drop(&mut self) {
        // This fails if the process has ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
