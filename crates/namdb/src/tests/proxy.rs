//! A proxy between a compute server and a node. It lets bytes through, holds them back, or breaks the
//! connections.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;

use rustix_futex_sync::{Condvar, Mutex};

/// Runs until it is dropped.
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    accepting: Option<JoinHandle<()>>,
}

struct Shared {
    to: SocketAddr,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    holds_back: bool,
    has_ended: bool,
    /// Both ends of all connections, present and past.
    ends: Vec<TcpStream>,
    copying: Vec<JoinHandle<()>>,
}

impl Proxy {
    /// A proxy in front of a server.
    pub fn before(to: SocketAddr) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared { to, state: Mutex::default(), changed: Condvar::new() });
        let here = shared.clone();
        let accepting = std::thread::spawn(move || {
            for client in listener.incoming() {
                if here.state.lock().has_ended {
                    return;
                }
                here.connect(client.unwrap());
            }
        });
        Proxy { address, shared, accepting: Some(accepting) }
    }

    /// The address on which it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sets whether bytes are held back. Connections stay open meanwhile.
    pub fn hold_back(&self, holds_back: bool) {
        self.shared.state.lock().holds_back = holds_back;
        self.shared.changed.notify_all();
    }

    /// Breaks all connections. Returns how many ends they had.
    pub fn break_all(&self) -> usize {
        let ends = std::mem::take(&mut self.shared.state.lock().ends);
        // A connection that has ended already cannot be broken.
        ends.iter().for_each(|end| drop(end.shutdown(Shutdown::Both)));
        ends.len()
    }
}

impl Shared {
    fn connect(self: &Arc<Self>, client: TcpStream) {
        // A server that is gone breaks the connection.
        let Ok(server) = TcpStream::connect(self.to) else { return };
        for end in [&client, &server] {
            end.set_nodelay(true).unwrap();
        }
        let [from_client, from_server] = [(&client, &server), (&server, &client)].map(|(from, to)| {
            let (shared, from, to) = (self.clone(), from.try_clone().unwrap(), to.try_clone().unwrap());
            std::thread::spawn(move || shared.copy(from, to))
        });
        let mut state = self.state.lock();
        state.ends.extend([client, server]);
        state.copying.extend([from_client, from_server]);
    }

    fn copy(&self, mut from: TcpStream, mut to: TcpStream) {
        let mut bytes = [0; 16 << 10];
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            drop(self.changed.wait_while(self.state.lock(), |state| state.holds_back && !state.has_ended));
            if to.write_all(&bytes[..count]).is_err() {
                break;
            }
        }
        // Tells the other end that the connection has ended.
        let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.state.lock().has_ended = true;
        self.shared.changed.notify_all();
        // Wakes the thread that accepts.
        let _ = TcpStream::connect(self.address);
        let accepting = self.accepting.take().map(JoinHandle::join);
        self.break_all();
        let copying = std::mem::take(&mut self.shared.state.lock().copying);
        let copied = copying.into_iter().map(JoinHandle::join).all(|copied| copied.is_ok());
        assert!(std::thread::panicking() || copied && accepting.is_none_or(|accepted| accepted.is_ok()));
    }
}
