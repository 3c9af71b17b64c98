//! The conformance suite over shared memory.

use std::any::Any;
use std::os::unix::net::UnixListener;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use farpool_fabric::conformance::{Carrier, SuiteHost};
use farpool_fabric::{Host, Listeners, Peer, ShmTransport, Transport, conformance_tests, serve};
use tempfile::TempDir;

/// The nodes' sockets are in one directory, which outlives the nodes.
struct Shm {
    directory: TempDir,
}

impl Shm {
    fn new() -> Self {
        Shm { directory: tempfile::tempdir().unwrap() }
    }
}

impl Carrier for Shm {
    fn serve(&self, host: Arc<SuiteHost>, at: Option<&Peer>) -> (Peer, Box<dyn Any>) {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let path = at.and_then(|peer| peer.shm_socket.clone()).unwrap_or_else(|| {
            let number = NEXT.fetch_add(1, Ordering::Relaxed); // only has to be unique
            self.directory.path().join(format!("node-{number}.sock"))
        });
        let listener = UnixListener::bind(&path).unwrap();
        let node = host.identity().node;
        let server = serve(host, Listeners { tcp: None, unix: Some((listener, path.clone())) }).unwrap();
        (Peer { node, tcp: None, verbs: None, shm_socket: Some(path) }, Box::new(server))
    }

    fn transport(&self) -> Rc<dyn Transport> {
        Rc::new(ShmTransport)
    }

    fn reads_now(&self) -> bool {
        true
    }
}

conformance_tests!(Shm::new());
