//! Reading several records in one step: with one doorbell for each node on which they lie.

use farpool_fabric::MAX_BATCH;

use super::reading::{self, Asked};
use super::{Row, Transaction};
use crate::error::ReadError;
use crate::memory::{Memory, Plan, run_all};
use crate::rules::Rules;
use crate::table::{Place, Table};

/// Bytes that are read in one step at most: a small part of a thread's arena.
const STEP_BYTES: usize = 64 << 10;

/// Records of one node that are read with one doorbell, and their indices among those that were asked for.
struct OnNode {
    indices: Vec<usize>,
    places: Vec<Place>,
}

impl<R: Rules> Transaction<'_, R> {
    /// Reads records, as [`read`](Self::read) does each, with one round trip for many.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub async fn read_many(&self, table: &Table, numbers: &[u64]) -> Result<Vec<Row>, ReadError> {
        let each = table.layout().current_bytes();
        let mut rows = Vec::with_capacity(numbers.len());
        for numbers in numbers.chunks((STEP_BYTES / each).clamp(1, MAX_BATCH)) {
            self.read_step(table, numbers, each, &mut rows).await?;
        }
        self.all_whole(table, numbers, rows).await
    }

    async fn read_step(
        &self,
        table: &Table,
        numbers: &[u64],
        each: usize,
        rows: &mut Vec<Row>,
    ) -> Result<(), ReadError> {
        let (memory, start) = (&self.worker.memory, rows.len());
        rows.resize_with(start + numbers.len(), Row::absent);
        let nodes = self.by_node(table, numbers, |index, row| rows[start + index] = row)?;
        let mut plans = nodes
            .iter()
            .map(|node| {
                let mut plan = plan_for(memory, node, each)?;
                for place in &node.places {
                    plan.read(&place.piece, place.layout.current(place.index));
                }
                Ok(plan)
            })
            .collect::<Result<Vec<_>, ReadError>>()?;
        run_all(&mut plans).await;
        for (node, plan) in nodes.iter().zip(&plans) {
            plan.check()?;
            for (turn, (&index, place)) in node.indices.iter().zip(&node.places).enumerate() {
                let bytes = plan.bytes(turn * each..(turn + 1) * each);
                rows[start + index] = match reading::settled::<R>(&self.cut, place, bytes)? {
                    Some(found) => reading::row(&found.label, found.data),
                    None => reading::read(self.worker, &self.cut, place).await?,
                };
            }
        }
        Ok(())
    }

    /// Reads records that will be written: what [`write`](Self::write) does first, with one round trip for
    /// many. A record that is not written afterwards counts as one that was only read: no other transaction
    /// conflicts with it.
    ///
    /// # Errors
    /// [`ReadError::Conflict`] if another transaction was first to write one of them.
    pub async fn take_many(&mut self, table: &Table, numbers: &[u64]) -> Result<Vec<Row>, ReadError> {
        let each = Asked::bytes(table.layout());
        let mut rows = Vec::with_capacity(numbers.len());
        for numbers in numbers.chunks((STEP_BYTES / each).clamp(1, MAX_BATCH)) {
            self.take_step(table, numbers, each, &mut rows).await?;
        }
        self.all_whole(table, numbers, rows).await
    }

    async fn take_step(
        &mut self,
        table: &Table,
        numbers: &[u64],
        each: usize,
        rows: &mut Vec<Row>,
    ) -> Result<(), ReadError> {
        let (memory, start) = (&self.worker.memory, rows.len());
        rows.resize_with(start + numbers.len(), Row::absent);
        let nodes = self.by_node(table, numbers, |index, row| rows[start + index] = row)?;
        let (mut plans, mut asked) = (Vec::with_capacity(nodes.len()), Vec::with_capacity(nodes.len()));
        for node in &nodes {
            let mut plan = plan_for(memory, node, each)?;
            asked.push(Asked::add(&mut plan, &node.places));
            plans.push(plan);
        }
        run_all(&mut plans).await;
        for ((node, plan), asked) in nodes.iter().zip(&plans).zip(&asked) {
            plan.check()?;
            for ((&index, place), asked) in node.indices.iter().zip(&node.places).zip(asked) {
                let before = match asked.found::<R>(plan, &self.cut, place)? {
                    Some(before) => before,
                    None => reading::read_to_write::<R>(memory, &self.cut, place).await?,
                };
                rows[start + index] = before.row();
                self.taken.insert(place.record, before);
            }
        }
        Ok(())
    }

    /// The places of the records that have to be read, by node; `known` gets the rows of the others.
    fn by_node(
        &self,
        table: &Table,
        numbers: &[u64],
        mut known: impl FnMut(usize, Row),
    ) -> Result<Vec<OnNode>, ReadError> {
        let mut nodes: Vec<OnNode> = Vec::new();
        for (index, &number) in numbers.iter().enumerate() {
            let place = table.place(number).ok_or(ReadError::OutOfRange(number))?;
            if let Some(row) = self.own(place.record) {
                known(index, row);
                continue;
            }
            let here = place.piece.region.node;
            match nodes.iter_mut().find(|node| node.places[0].piece.region.node == here) {
                Some(node) => {
                    node.indices.push(index);
                    node.places.push(place);
                }
                None => nodes.push(OnNode { indices: vec![index], places: vec![place] }),
            }
        }
        Ok(nodes)
    }
}

fn plan_for<'a>(memory: &'a Memory, node: &OnNode, each: usize) -> Result<Plan<'a>, ReadError> {
    Ok(memory.plan(node.places[0].piece.region.node, each * node.places.len())?)
}
