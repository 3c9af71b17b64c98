//! Clients: they look up and insert keys as the seed says, and record the answers.

use std::rc::Rc;
use std::time::Duration;

use farpool_fabric::sim::{ProcessId, Random};
use farpool_txn::Memory;
use farpool_txn::hash::{IndexError, IndexRules};

use super::judge::Question;
use super::keys::STRANGERS;
use super::known::Known;
use super::{ClientPlace, Run};
use crate::indexing::{DEADLINE, LAST_DEADLINE, Setting};

/// Questions of each task.
const ROUNDS: u64 = 14;
/// Pause between two checks whether all others have ended.
const PAUSE: Duration = Duration::from_micros(100);

/// Starts the tasks of a client's current process. They share what they remember of the index.
pub(super) fn start<R: IndexRules>(run: &Rc<Run>, place: ClientPlace) {
    let process = run.setting.clients.borrow()[place.index];
    let mut random = run.setting.notes.random();
    let known = Known::<R>::some(run, &mut random);
    for _ in 0..1 + random.below(3) {
        let mut client = Client::new(run, &known, process, place, DEADLINE);
        let staying = run.setting.left.stay();
        run.setting.tasks.spawn(process, async move {
            client.live().await;
            drop(staying);
        });
    }
}

/// Waits until all others have ended and no more faults occur, then checks that every key can be inserted and
/// found.
pub(super) fn start_last<R: IndexRules>(run: &Rc<Run>, places: &[ClientPlace]) {
    let finder_place = places[0];
    let finder = run.setting.world.add_process(finder_place.host);
    let (here, places) = (run.clone(), places.to_vec());
    run.setting.tasks.spawn(finder, async move {
        while here.setting.left.get() > 0 {
            here.setting.world.sleep(PAUSE).await;
        }
        here.setting.world.note("nothing goes wrong any more", &[]);
        for place in places {
            let process = here.setting.world.add_process(place.host);
            let known = Known::<R>::some(&here, &mut here.setting.notes.random());
            let mut client = Client::new(&here, &known, process, place, LAST_DEADLINE);
            let staying = here.setting.left.stay();
            here.setting.tasks.spawn(process, async move {
                client.ask_for_all(Question::Insert).await;
                drop(staying);
            });
        }
        while here.setting.left.get() > 0 {
            here.setting.world.sleep(PAUSE).await;
        }
        let known = Known::<R>::all(&here);
        Client::new(&here, &known, finder, finder_place, LAST_DEADLINE).ask_for_all(Question::Find).await;
    });
}

struct Client<R> {
    run: Rc<Run>,
    known: Rc<Known<R>>,
    process: ProcessId,
    place: ClientPlace,
    deadline: Duration,
    random: Random,
    /// Its connections, until one of them fails.
    memory: Option<Memory>,
}

impl<R: IndexRules> Client<R> {
    fn new(
        run: &Rc<Run>,
        known: &Rc<Known<R>>,
        process: ProcessId,
        place: ClientPlace,
        deadline: Duration,
    ) -> Self {
        let random = run.setting.notes.random();
        Client { run: run.clone(), known: known.clone(), process, place, deadline, random, memory: None }
    }

    async fn live(&mut self) {
        for _ in 0..ROUNDS {
            let key = self.random.index(self.run.keys.count());
            let is_stranger = key < STRANGERS;
            let question =
                if is_stranger || self.random.chance(450) { Question::Find } else { Question::Insert };
            self.ask(key, question).await;
        }
    }

    /// Asks the question for all keys, in an order drawn for this client.
    async fn ask_for_all(&mut self, question: Question) {
        let mut keys: Vec<usize> = (0..self.run.keys.count()).collect();
        self.random.shuffle(&mut keys);
        for key in keys {
            if !self.ask(key, question).await && self.run.is_roomy {
                self.run
                    .setting
                    .notes
                    .complain(format!("the index does not answer for key {key}, though faults have ended"));
            }
        }
    }

    /// Asks once. Returns false if there was no answer.
    async fn ask(&mut self, key: usize, question: Question) -> bool {
        let memory = match self.memory.take() {
            Some(memory) => memory,
            None => {
                let (process, place, deadline) = (self.process, self.place, self.deadline);
                match Setting::connect(&self.run, process, place, deadline, &mut self.random).await {
                    Some(memory) => memory,
                    None => return false,
                }
            }
        };
        let numbers = [self.place.index as u64, key as u64];
        let number = match question {
            Question::Find => {
                self.run.setting.world.note("client {} looks for key {}", &numbers);
                let place = self.run.history.borrow_mut().begin(key, question);
                let wanted = self.run.keys.get(key);
                (place, self.known.ask(async |index| index.find(&memory, wanted).await).await)
            }
            Question::Insert => {
                self.run.setting.world.note("client {} inserts key {}", &numbers);
                let place = self.run.history.borrow_mut().begin(key, question);
                let wanted = self.run.keys.get(key);
                let found = self.known.ask(async |index| index.find_or_insert(&memory, wanted).await).await;
                (place, found.map(|found| Some(found.number())))
            }
        };
        match number {
            (place, Ok(number)) => {
                self.run.history.borrow_mut().end(place, number);
                let told = [numbers[0], numbers[1], number.map_or(0, |number| number + 1)];
                self.run
                    .setting
                    .world
                    .note("client {} is answered about key {}: number {}, from one on", &told);
            }
            // The outcome is in doubt, and the connections are unusable.
            (_, Err(IndexError::Memory(_))) => return false,
            (_, Err(IndexError::Full | IndexError::Crowded)) if !self.run.is_roomy => {}
            (_, Err(error)) => self.run.setting.notes.complain(format!("key {key}: {error}")),
        }
        self.memory = Some(memory);
        true
    }
}
