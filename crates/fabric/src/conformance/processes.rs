//! Clients that are processes of their own: they can be stopped between any two instructions.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use farpool_wire::{Epoch, GrantMode, NodeId};
use rustix::process::{Pid, Signal, kill_process};

use super::Carrier;
use super::rig::{DEADLINE, EPOCH, KEY, Member, Rig, at, key_of, wait_until};
use crate::{Peer, block_on};

/// Tells a test program that it is a process of a check, and where the node is.
const CHILD: &str = "FARPOOL_SUITE_CHILD";
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
        return; // nobody there to be stopped: the simulator has its own ways
    }
    let rig = Rig::new(carrier);
    let owner = Member::join(carrier, &rig.peer, EPOCH, KEY);
    let mut child = ChildClient::spawn(&rig.peer);
    for round in 0..STOPS {
        let epoch = Epoch(100 + round);
        rig.host.regions.open_grant(0, epoch, key_of(epoch), GrantMode::ReadWrite);
        child.say(&format!("flood {}", epoch.0));
        child.expect("flooding");
        (0..round * 7919 % 5000).for_each(|_| std::hint::spin_loop()); // some moment or other
        child.stop();
        rig.host.regions.fence_grant(0, epoch).expect("memory to move to");
        owner.write_whatever_moves(FLOOD_AT, &[OURS; FLOOD_BYTES]);
        child.resume();
        child.expect("ended");
        let found = owner.read(FLOOD_AT, FLOOD_BYTES).expect("nothing was fenced since");
        let foreign = found.iter().position(|&byte| byte != OURS);
        assert_eq!(foreign, None, "a fenced client's byte in round {round}");
    }
}

/// What a test program does when a check has started it as a process; nothing otherwise.
pub fn run_as_child(carrier: &dyn Carrier) {
    let Ok(peer) = std::env::var(CHILD) else { return };
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

fn answer(text: &str) {
    eprintln!("{ANSWER}{text}");
}

fn add(member: &Member) {
    for _ in 0..ADDITIONS {
        let addition = member.queue.fetch_and_add(at(COUNTER_AT), EPOCH, 1);
        block_on(&member.endpoint, addition).expect("nobody fences it");
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

impl ChildClient {
    fn spawn(peer: &Peer) -> ChildClient {
        let program = std::env::current_exe().expect("a test program has a path");
        let mut process = Command::new(program)
            .args(["--exact", CHILD_TEST, "--nocapture"])
            .env(CHILD, encode_peer(peer))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("a process more");
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
        let patience = DEADLINE + Duration::from_secs(10);
        assert_eq!(self.answers.recv_timeout(patience).as_deref(), Ok(wanted), "from the child");
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
        // Failing means that it has ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
