//! Keeps the node registered with the broker. It reports the node's table, sends heartbeats, and reports the
//! table again when the broker asks for it or did not answer. Leases do not depend on any of this.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use farpool_control::{ControlError, Tls, dial, explain};
use farpool_wire::control::broker_client::BrokerClient;
use farpool_wire::control::{HeartbeatRequest, RegisterRequest, StatusRequest};
use tokio::time::{Instant, sleep, timeout};
use tonic::Status;
use tonic::transport::Channel;

use crate::lender::Lender;

/// Longest wait for the broker's answer; the broker may have to wait for its disk.
const ANSWER_DEADLINE: Duration = Duration::from_secs(3);

/// Pause after the first failed attempt. It doubles up to [`LONGEST_PAUSE`], so that a broker that comes back
/// has its nodes within seconds and is not flooded by them.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// Longest pause between attempts.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Shortest interval between heartbeats, whatever the broker asks for.
const SHORTEST_INTERVAL: Duration = Duration::from_millis(100);
/// Longest interval between heartbeats, whatever the broker asks for.
const LONGEST_INTERVAL: Duration = Duration::from_secs(10);

/// When a region becomes free, the node sends a heartbeat early, since the broker places nothing on a node
/// that it believes to be full. But the node waits at least this long after the last heartbeat, so that
/// leases that come and go cost the broker at most five heartbeats a second.
const FREED_INTERVAL: Duration = Duration::from_millis(200);

/// A node's registration with its broker.
pub struct Registration<L> {
    lender: Arc<L>,
    broker: BrokerClient<Channel>,
    broker_address: String,
    said: Option<Result<(), String>>,
}

/// Proof that a node has registered, with the interval of its heartbeats.
#[derive(Clone, Copy, Debug)]
pub struct Registered(Duration);

/// Asks the broker whether it is there. The error says why it seems not to be.
///
/// # Errors
/// The address or the certificates are unusable.
pub async fn find_broker(broker: &str, tls: Option<&Tls>) -> Result<Result<(), String>, ControlError> {
    let mut client = BrokerClient::new(dial(broker, tls)?);
    let asked = client.status(StatusRequest { only_sums: true, ..StatusRequest::default() });
    let answer = timeout(ANSWER_DEADLINE, asked).await.map_err(late);
    Ok(answer.and_then(|answer| answer.map(drop)).map_err(|status| explain(&status)))
}

impl<L: Lender> Registration<L> {
    /// Prepares to register with `broker`. Fails if the address or the certificates are unusable.
    pub fn new(lender: Arc<L>, broker: &str, tls: Option<&Tls>) -> Result<Self, ControlError> {
        let client = BrokerClient::new(dial(broker, tls)?);
        Ok(Registration { lender, broker: client, broker_address: broker.to_owned(), said: None })
    }

    /// Registers, and tries again for up to `within`. The error says why the last try failed.
    pub async fn first(&mut self, within: Duration) -> Result<Registered, String> {
        let deadline = Instant::now() + within;
        let mut pause = FIRST_PAUSE;
        loop {
            match self.register().await {
                Ok(interval) => {
                    self.say(Ok(()));
                    return Ok(Registered(interval));
                }
                Err(status) if Instant::now() + pause > deadline => return Err(explain(&status)),
                Err(status) => self.say(Err(explain(&status))),
            }
            sleep(pause).await;
            pause = LONGEST_PAUSE.min(pause * 2);
        }
    }

    /// Keeps the node registered while it is polled, whatever happens to the broker.
    pub async fn keep(mut self, registered: Registered) -> Infallible {
        let mut pause = FIRST_PAUSE;
        let mut standing = Ok(registered.0);
        loop {
            let lost = match standing {
                Ok(interval) => {
                    self.say(Ok(()));
                    pause = FIRST_PAUSE;
                    self.beat(interval).await
                }
                Err(status) => Err(status),
            };
            if let Err(status) = lost {
                self.say(Err(explain(&status)));
                sleep(pause).await;
                pause = LONGEST_PAUSE.min(pause * 2);
            }
            standing = self.register().await;
        }
    }

    /// Logs whether the node is registered, when that has changed: a broker may be away for hours while the
    /// node keeps asking it.
    fn say(&mut self, standing: Result<(), String>) {
        if self.said.as_ref() == Some(&standing) {
            return;
        }
        match &standing {
            Ok(()) => tracing::info!(broker = self.broker_address, "registered with the broker"),
            Err(reason) => {
                tracing::warn!(broker = self.broker_address, reason, "not registered; still trying");
            }
        }
        self.said = Some(standing);
    }

    /// Reports the node's table. Returns the interval of heartbeats.
    async fn register(&mut self) -> Result<Duration, Status> {
        let report = RegisterRequest {
            address: Some(self.lender.address()),
            region_bytes: self.lender.region_bytes(),
            regions_total: self.lender.regions_total(),
            lent: self.lender.states(),
        };
        let answer = timeout(ANSWER_DEADLINE, self.broker.register(report)).await.map_err(late)??;
        let interval = Duration::from_millis(answer.into_inner().heartbeat_interval_ms);
        Ok(interval.clamp(SHORTEST_INTERVAL, LONGEST_INTERVAL))
    }

    /// Waits until the next heartbeat is due: for the interval, or less when a region becomes free or is
    /// withdrawn.
    async fn until_next(&self, interval: Duration) {
        let unasked = interval.min(FREED_INTERVAL);
        sleep(unasked).await;
        // The heartbeat is due in either case.
        let _ = timeout(interval - unasked, self.lender.counts_changed()).await;
    }

    /// Sends heartbeats until the broker asks for a report, or does not answer.
    async fn beat(&mut self, interval: Duration) -> Result<(), Status> {
        loop {
            self.until_next(interval).await;
            let (address, (counts, table)) = (self.lender.address(), self.lender.counts());
            let beat = HeartbeatRequest {
                node: address.node,
                incarnation: address.incarnation,
                regions_free: counts.free,
                regions_lent: counts.held,
                regions_withdrawn: counts.withdrawn,
                frames_rejected: self.lender.frames_rejected(),
                table,
            };
            let answer = timeout(ANSWER_DEADLINE, self.broker.heartbeat(beat)).await.map_err(late)??;
            if answer.into_inner().register_again {
                return Ok(());
            }
        }
    }
}

fn late(_: tokio::time::error::Elapsed) -> Status {
    Status::deadline_exceeded("no answer in time")
}

#[cfg(test)]
pub(crate) mod fake {
    use std::net::SocketAddr;
    use std::sync::atomic::{AtomicBool, Ordering};

    use farpool_control::Listener;
    use farpool_wire::control::broker_server::{Broker, BrokerServer};
    use farpool_wire::control::{
        AcquireRequest, AcquireResponse, HeartbeatResponse, RegisterResponse, RevokeRequest, RevokeResponse,
        StatusRequest, StatusResponse,
    };
    use tokio::sync::mpsc;
    use tokio::task::JoinHandle;
    use tonic::{Request, Response};

    use super::*;

    /// Longest wait for one step: whatever takes longer hangs.
    pub const PATIENCE: Duration = Duration::from_secs(20);

    /// What the broker asks for: more often than nodes send them.
    const HEARTBEAT_INTERVAL_MS: u64 = 1;

    #[derive(Debug)]
    pub enum Heard {
        Report(RegisterRequest),
        Beat(HeartbeatRequest),
    }

    /// Forwards the messages that it receives. With `asks_again` it asks for a report at each heartbeat, else
    /// only until it has received one.
    pub struct FakeBroker {
        heard: mpsc::Sender<Heard>,
        asks_again: bool,
        has_report: AtomicBool,
    }

    impl FakeBroker {
        pub fn new(heard: mpsc::Sender<Heard>, asks_again: bool) -> Self {
            FakeBroker { heard, asks_again, has_report: AtomicBool::new(false) }
        }
    }

    #[tonic::async_trait]
    impl Broker for FakeBroker {
        async fn register(
            &self,
            request: Request<RegisterRequest>,
        ) -> Result<Response<RegisterResponse>, Status> {
            self.has_report.store(true, Ordering::Release);
            self.heard.send(Heard::Report(request.into_inner())).await.unwrap();
            Ok(Response::new(RegisterResponse { heartbeat_interval_ms: HEARTBEAT_INTERVAL_MS }))
        }

        async fn heartbeat(
            &self,
            request: Request<HeartbeatRequest>,
        ) -> Result<Response<HeartbeatResponse>, Status> {
            self.heard.send(Heard::Beat(request.into_inner())).await.unwrap();
            let register_again = self.asks_again || !self.has_report.load(Ordering::Acquire);
            Ok(Response::new(HeartbeatResponse { register_again }))
        }

        async fn acquire(&self, _: Request<AcquireRequest>) -> Result<Response<AcquireResponse>, Status> {
            Err(Status::unimplemented("nodes do not acquire"))
        }

        async fn revoke(&self, _: Request<RevokeRequest>) -> Result<Response<RevokeResponse>, Status> {
            Err(Status::unimplemented("nodes do not take leases back"))
        }

        async fn status(&self, _: Request<StatusRequest>) -> Result<Response<StatusResponse>, Status> {
            Ok(Response::new(StatusResponse::default()))
        }
    }

    pub struct RunningBroker {
        pub address: SocketAddr,
        heard: mpsc::Receiver<Heard>,
        pub task: JoinHandle<Result<(), ControlError>>,
    }

    impl RunningBroker {
        pub async fn start(address: &str, asks_again: bool) -> Self {
            let listener = Listener::bind(address.parse().unwrap(), None).await.unwrap();
            let (sender, heard) = mpsc::channel(100);
            let address = listener.address();
            let service = BrokerServer::new(FakeBroker::new(sender, asks_again));
            let task = tokio::spawn(listener.serve(service, std::future::pending()));
            RunningBroker { address, heard, task }
        }

        pub async fn next(&mut self) -> Heard {
            tokio::time::timeout(PATIENCE, self.heard.recv()).await.expect("the node speaks").unwrap()
        }

        pub async fn next_report(&mut self) -> RegisterRequest {
            let report = async {
                loop {
                    if let Heard::Report(report) = self.next().await {
                        return report;
                    }
                }
            };
            tokio::time::timeout(PATIENCE, report).await.expect("the node reports")
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use farpool_control::Listener;
    use farpool_lease::LeaseClass;
    use farpool_wire::OwnerId;
    use farpool_wire::control::LeaseRef;
    use farpool_wire::control::broker_server::BrokerServer;
    use tokio::sync::mpsc;
    use tokio::task::JoinHandle;

    use super::fake::{FakeBroker, Heard, PATIENCE, RunningBroker};
    use super::*;
    use crate::lender::fake::{FRAMES_REJECTED, FakeLender};
    use crate::logged::logged;

    fn keep_registered(lender: &Arc<FakeLender>, broker: SocketAddr) -> JoinHandle<Infallible> {
        let mut registration = Registration::new(lender.clone(), &broker.to_string(), None).unwrap();
        tokio::spawn(async move {
            let registered = registration.first(PATIENCE).await.unwrap();
            registration.keep(registered).await
        })
    }

    #[tokio::test]
    async fn a_node_reports_its_table_and_then_sends_heartbeats() {
        let lender = Arc::new(FakeLender::new(4));
        lender.grant(OwnerId(7), LeaseClass::Pinned, 3);
        let mut broker = RunningBroker::start("127.0.0.1:0", false).await;
        let _node = keep_registered(&lender, broker.address);
        let report = broker.next_report().await;
        assert_eq!((report.address, report.region_bytes), (Some(lender.address()), lender.region_bytes()));
        assert_eq!((report.regions_total, report.lent.len()), (4, 3));
        for _ in 0..2 {
            let Heard::Beat(beat) = broker.next().await else { panic!("a report that was not requested") };
            assert_eq!((beat.regions_free, beat.regions_lent), (1, 3));
            assert_eq!((beat.node, beat.incarnation), (1, 1));
            assert_eq!((beat.frames_rejected, beat.table), (FRAMES_REJECTED, lender.counts().1));
        }
    }

    #[tokio::test]
    async fn a_node_reports_again_when_told() {
        let lender = Arc::new(FakeLender::new(4));
        let mut broker = RunningBroker::start("127.0.0.1:0", true).await;
        let _node = keep_registered(&lender, broker.address);
        assert!(broker.next_report().await.lent.is_empty());
        lender.grant(OwnerId(7), LeaseClass::Revocable, 1);
        assert_eq!(broker.next_report().await.lent.len(), 1);
    }

    #[tokio::test]
    async fn a_freed_region_causes_an_early_heartbeat() {
        const HOUR: Duration = Duration::from_secs(3600);
        let lender = Arc::new(FakeLender::new(2));
        let mut leases = lender.grant(OwnerId(7), LeaseClass::Pinned, 2);
        let registration = Registration::new(lender.clone(), "127.0.0.1:1", None).unwrap();
        for lease in leases.drain(..) {
            let named = LeaseRef { region: lease.region, epoch: lease.epoch, key: lease.key };
            lender.release(OwnerId(7), &named).unwrap();
            tokio::time::timeout(PATIENCE, registration.until_next(HOUR)).await.expect("it is time");
        }
        assert_eq!(lender.counts().0.free, 2);
        assert!(tokio::time::timeout(FREED_INTERVAL * 2, registration.until_next(HOUR)).await.is_err());
    }

    #[tokio::test]
    async fn a_node_waits_for_a_broker_that_is_not_there_yet() {
        let address = nowhere().await;
        let _node = keep_registered(&Arc::new(FakeLender::new(4)), address.parse().unwrap());
        let mut broker = RunningBroker::start(&address, false).await;
        broker.next_report().await;
    }

    /// An address on which nothing listens.
    async fn nowhere() -> String {
        let listener = Listener::bind("127.0.0.1:0".parse().unwrap(), None).await.unwrap();
        listener.address().to_string()
    }

    #[tokio::test]
    async fn a_broker_is_found_only_where_one_answers() {
        let broker = RunningBroker::start("127.0.0.1:0", false).await;
        assert_eq!(find_broker(&broker.address.to_string(), None).await.unwrap(), Ok(()));
        let reason = find_broker(&nowhere().await, None).await.unwrap().unwrap_err();
        assert!(reason.contains("refused"), "{reason}");
    }

    /// The clock of these tests stands still, and leaps to the next timer when all tasks wait for one.
    #[tokio::test(start_paused = true)]
    async fn a_node_that_reaches_no_broker_in_time_gets_the_reason() {
        // Attempts are made after 0, 0.1, 0.3, 0.7, 1.5, 3.1 and 5.1 s, and then every 2 s.
        for (within_ms, gives_up_ms) in [(0, 0), (99, 0), (100, 100), (10_000, 9_100)] {
            let (lender, address) = (Arc::new(FakeLender::new(1)), nowhere().await);
            let mut registration = Registration::new(lender, &address, None).unwrap();
            let started = Instant::now();
            let first = registration.first(Duration::from_millis(within_ms));
            let reason = timeout(PATIENCE, first).await.expect("it gives up").unwrap_err();
            assert!(reason.contains("refused"), "{reason}");
            assert_eq!(started.elapsed().as_millis() / 10 * 10, gives_up_ms, "within {within_ms} ms");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_whose_broker_is_gone_asks_for_it_ever_less_often_but_every_two_seconds() {
        let lender = Arc::new(FakeLender::new(1));
        let registration = Registration::new(lender.clone(), &nowhere().await, None).unwrap();
        let keep = registration.keep(Registered(SHORTEST_INTERVAL));
        // A heartbeat after 0.1 s, then reports after pauses of 0.1, 0.2, 0.4, 0.8, 1.6 and 2 s.
        assert!(timeout(Duration::from_millis(11_300), keep).await.is_err());
        assert_eq!(lender.reports(), 9);
    }

    #[tokio::test(start_paused = true)]
    async fn a_heartbeat_is_sent_after_the_interval_if_no_region_becomes_free() {
        let registration = Registration::new(Arc::new(FakeLender::new(1)), "127.0.0.1:1", None).unwrap();
        for interval in [SHORTEST_INTERVAL, FREED_INTERVAL, LONGEST_INTERVAL] {
            let started = Instant::now();
            registration.until_next(interval).await;
            assert_eq!(started.elapsed().as_millis() / 10, interval.as_millis() / 10);
        }
    }

    #[tokio::test]
    async fn heartbeats_are_not_sent_more_often_than_ten_times_a_second_whatever_the_broker_asks_for() {
        let broker = RunningBroker::start("127.0.0.1:0", false).await;
        let (lender, address) = (Arc::new(FakeLender::new(1)), broker.address.to_string());
        let mut registration = Registration::new(lender, &address, None).unwrap();
        let Registered(interval) = registration.first(PATIENCE).await.unwrap();
        assert_eq!(interval, SHORTEST_INTERVAL);
    }

    #[tokio::test]
    async fn an_operator_reads_once_that_the_broker_is_away_and_once_that_it_is_back() {
        let mut registration = Registration::new(Arc::new(FakeLender::new(1)), "127.0.0.1:1", None).unwrap();
        let mut says =
            |standing: Result<(), &str>| logged(|| registration.say(standing.map_err(str::to_owned))).len();
        assert_eq!([says(Ok(())), says(Ok(()))], [1, 0]);
        assert_eq!([says(Err("refused")), says(Err("refused")), says(Err("late"))], [1, 0, 1]);
        assert_eq!([says(Ok(())), says(Ok(()))], [1, 0]);
    }

    #[tokio::test]
    async fn a_broker_that_was_restarted_gets_the_node_back() {
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let listener = Listener::bind("127.0.0.1:0".parse().unwrap(), None).await.unwrap();
        let address = listener.address();
        let (sender, mut heard) = mpsc::channel(100);
        let service = BrokerServer::new(FakeBroker::new(sender, false));
        let first = tokio::spawn(listener.serve(service, async { stopped.await.unwrap() }));
        let _node = keep_registered(&Arc::new(FakeLender::new(4)), address);
        assert!(matches!(heard.recv().await, Some(Heard::Report(_))));
        stop.send(()).unwrap();
        first.await.unwrap().unwrap();
        let mut second = RunningBroker::start(&address.to_string(), false).await;
        second.next_report().await;
        second.task.abort();
    }

    #[tokio::test]
    async fn plaintext_off_loopback_is_refused() {
        let error = Registration::new(Arc::new(FakeLender::new(1)), "10.0.0.1:7700", None).err().unwrap();
        assert!(matches!(error, ControlError::PlaintextOffLoopback { .. }));
    }
}
