//! A network between clients and a node: it forwards connections, and can hold back what clients send.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

/// Forwards connections until the program ends.
pub struct Relay {
    address: SocketAddr,
    network: Arc<Network>,
}

#[derive(Default)]
struct Network {
    state: Mutex<State>,
    released: Condvar,
}

#[derive(Default)]
struct State {
    node: Option<SocketAddr>,
    /// Connections so far.
    opened: u64,
    /// Connections with lower numbers are held back.
    held_below: u64,
}

impl Relay {
    pub fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let network = Arc::new(Network::default());
        let forwarding = network.clone();
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                forwarding.forward(client);
            }
        });
        Relay { address, network }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// New connections go to this node.
    pub fn lead_to(&self, node: SocketAddr) {
        self.network.state.lock().unwrap().node = Some(node);
    }

    /// Holds back what clients send on the connections that are open now, or delivers it.
    pub fn hold_back(&self, held: bool) {
        let mut state = self.network.state.lock().unwrap();
        state.held_below = if held { state.opened } else { 0 };
        self.network.released.notify_all();
    }
}

impl Network {
    fn forward(self: &Arc<Self>, client: TcpStream) {
        let (number, node) = {
            let mut state = self.state.lock().unwrap();
            state.opened += 1;
            (state.opened - 1, state.node.unwrap())
        };
        let Ok(node) = TcpStream::connect(node) else { return };
        let (answers, asker) = (node.try_clone().unwrap(), client.try_clone().unwrap());
        thread::spawn(move || pump(answers, asker, || {}));
        let network = self.clone();
        thread::spawn(move || pump(client, node, || network.wait_while_held(number)));
    }

    fn wait_while_held(&self, number: u64) {
        let state = self.state.lock().unwrap();
        drop(self.released.wait_while(state, |state| number < state.held_below).unwrap());
    }
}

/// Carries bytes until either end is gone.
fn pump(mut from: TcpStream, mut to: TcpStream, before_delivery: impl Fn()) {
    let mut bytes = vec![0; 64 << 10];
    while let Ok(received @ 1..) = from.read(&mut bytes) {
        before_delivery();
        if to.write_all(&bytes[..received]).is_err() {
            break;
        }
    }
    // Either end may be gone already.
    let _ = to.shutdown(Shutdown::Write);
}
