// Cells of prose keep a width that can be read; short ones take what they need. A table too wide for the page scrolls.
document.querySelectorAll(".md-typeset table:not([class]) td").forEach((cell) => {
  if (cell.textContent.trim().length > 40) cell.classList.add("prose");
});
