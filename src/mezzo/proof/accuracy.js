"use strict";
// Rows come by harm; the switch puts them as they were computed, and back.
const choice = document.getElementById("order");
const body = document.querySelector("#rows tbody");
choice.hidden = false;
choice.addEventListener("change", (event) => {
  const key = event.target.value;
  const rows = Array.from(body.rows);
  rows.sort((one, other) => Number(one.dataset[key]) - Number(other.dataset[key]));
  body.append(...rows);
});
